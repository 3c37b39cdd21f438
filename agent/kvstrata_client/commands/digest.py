"""Command that names a prefix for a KVPrefixShare: digest."""

import argparse
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstrata_api.blocks import prefix_digest, shared_blocks
from kvstrata_api.errors import InvalidInputError, UnsupportedError
from kvstrata_api.names import API_VERSION
from kvstrata_api.validate import validate
from kvstrata_client.commands import output
from kvstrata_client.commands.output import UsageError
from kvstrata_client.commands.token_ids import checked, read_ids, read_text

TOKENS_MAX: Final = 10_000_000
"""`maximum` of spec.prefixes[].tokenCount."""

BLOCK_TOKENS_MAX: Final = 1_024
"""`maximum` of spec.compatibility.blockTokens."""
_TARGETS: Final = ("tenant", "domain")


def options(found: argparse.ArgumentParser) -> None:
    """Options of the command."""
    found.epilog = "example: kvstrata digest --text-file system-prompt.txt --tokenizer Qwen3-0.6B"
    found.description = (
        "The digest is SHA-256 over the token ids, four bytes each, least significant first. Whoever can "
        "guess the tokens can check the guess against it."
    )
    found.add_argument("tokens", nargs="*", type=int, metavar="ID", help="token ids, unless another option gives them")
    found.add_argument("--tokens", dest="file", metavar="FILE", help="JSON list of token ids, - for standard input")
    found.add_argument("--text", help="text to be tokenized as it stands, after any chat template; needs --tokenizer")
    found.add_argument("--text-file", metavar="FILE", help="the same from a file, - for standard input")
    found.add_argument("--tokenizer", type=Path, metavar="PATH", help="a tokenizer.json, or a model's folder with one")
    found.add_argument("--no-special-tokens", action="store_true", help="leave out what a tokenizer adds by itself")
    found.add_argument("--description", default="", help="for people")
    found.add_argument("--block-tokens", type=int, default=16, help="of the pool, to tell how much is shared")
    found.add_argument("--share", metavar="NAMESPACE/NAME", help="print a whole KVPrefixShare; needs --pool and --to")
    found.add_argument("--pool", help="pool of the share")
    found.add_argument("--to", action="append", default=[], metavar="tenant:NAME|domain:NAME", help="reader")
    found.add_argument("--expires-at", help="end of the share, RFC 3339")
    output.add_option(found, default="yaml")
    found.set_defaults(run=_digest)


def _digest(given: argparse.Namespace) -> int:
    """Print one prefix, or a whole share of it."""
    if not 1 <= given.block_tokens <= BLOCK_TOKENS_MAX:
        raise UsageError(f"--block-tokens {given.block_tokens}: 1 to {BLOCK_TOKENS_MAX} wanted")
    tokens = _tokens(given)
    prefix: dict[str, Any] = {"digest": prefix_digest(tokens).hex(), "tokenCount": len(tokens)}
    if given.description:
        prefix["description"] = given.description
    printed = _share(given, prefix) if given.share else {"prefixes": [prefix]}
    if given.output == "yaml":
        blocks = shared_blocks(len(tokens), given.block_tokens)
        sys.stdout.write(
            f"# {blocks} whole blocks of {given.block_tokens} tokens are shared, the rest stays private.\n"
        )
    output.show(given.output, printed)
    return 0


def _share(given: argparse.Namespace, prefix: dict[str, Any]) -> dict[str, Any]:
    """Put a KVPrefixShare together. Raises `InvalidInputError` for one that the API server would refuse."""
    namespace, _, name = given.share.partition("/")
    targets = [t.partition(":") for t in given.to]
    if not name or not given.pool or not targets or any(kind not in _TARGETS for kind, _, _ in targets):
        raise UsageError("--share NAMESPACE/NAME needs --pool NAME and --to tenant:NAME or --to domain:NAME")
    spec: dict[str, Any] = {"poolRef": given.pool, "prefixes": [prefix], "to": [{k: n} for k, _, n in targets]}
    if given.expires_at:
        spec["expiresAt"] = given.expires_at
    metadata = {"namespace": namespace, "name": name}
    share = {"apiVersion": API_VERSION, "kind": "KVPrefixShare", "metadata": metadata, "spec": spec}
    if problems := validate(share):
        raise InvalidInputError("; ".join(map(str, problems)))
    return share


def _tokens(given: argparse.Namespace) -> npt.NDArray[np.uint32]:
    """Token ids from whichever option gives them; exactly one may."""
    sources = [bool(given.tokens), given.file is not None, given.text is not None, given.text_file is not None]
    if sources.count(True) != 1:
        raise UsageError("give token ids, --tokens, --text or --text-file: exactly one of them")
    if given.file is not None:
        tokens = read_ids(given.file)
    else:
        tokens = checked(given.tokens) if given.tokens else _tokenized(given)
    if not 0 < len(tokens) <= TOKENS_MAX:
        raise InvalidInputError(f"{len(tokens)} tokens, 1 to {TOKENS_MAX} wanted")
    return tokens


def _tokenized(given: argparse.Namespace) -> npt.NDArray[np.uint32]:
    """Tokenize text. Raises `InvalidInputError` without a tokenizer, `UnsupportedError` without its package."""
    if given.tokenizer is None:
        raise InvalidInputError("--tokenizer is missing: the same text has other tokens in every model")
    text = given.text if given.text is not None else read_text(given.text_file)
    path = given.tokenizer / "tokenizer.json" if given.tokenizer.is_dir() else given.tokenizer
    if not path.exists():
        raise InvalidInputError(f"--tokenizer {given.tokenizer}: there is no {path}; give the folder of a model")
    try:
        from tokenizers import Tokenizer
    except ImportError as e:
        raise UnsupportedError("text needs the package `tokenizers` (it comes with transformers); or give ids") from e
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as e:
        raise InvalidInputError(f"--tokenizer {path}: {e}") from e
    return np.asarray(tokenizer.encode(text, add_special_tokens=not given.no_special_tokens).ids, dtype=np.uint32)

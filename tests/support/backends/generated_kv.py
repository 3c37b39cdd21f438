"""Generated KV tensors with the statistics that codecs see: few exponents matter, mantissas are noise."""

import numpy as np
import numpy.typing as npt

U16 = npt.NDArray[np.uint16]


def bf16(values: npt.NDArray[np.float64]) -> U16:
    """Round to nearest even, as an engine does."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def kv_block(seed: int, tokens: int = 16, heads: int = 8, dim: int = 128, layers: int = 4) -> bytes:
    """One block `(layers, 2, heads, tokens, dim)` in bf16.

    K: a low-rank signal that is correlated from token to token, a scale for each channel, and four outlier
    channels 4 to 16 times as large. V: low rank plus noise with a log-normal scale for each token.
    """
    rng = np.random.default_rng(seed)
    parts = []
    for layer in range(layers):
        rank = 12 + 7 * layer
        signal = np.cumsum(0.6 * rng.standard_normal((heads, tokens, rank)), axis=1)
        weights = np.arange(1, rank + 1) ** -0.7
        k = signal @ (rng.standard_normal((heads, rank, dim)) * weights[:, None])
        k = (k + 0.35 * rng.standard_normal(k.shape)) * np.exp(0.3 * rng.standard_normal(dim))
        outliers = rng.choice(dim, 4, replace=False)
        k[:, :, outliers] += rng.uniform(4, 16, 4) * rng.choice([-1, 1], 4)
        v = signal @ (rng.standard_normal((heads, rank, dim)) * weights[:, None])
        v = (v + 0.5 * rng.standard_normal(v.shape)) * np.exp(0.35 * rng.standard_normal((1, tokens, 1)))
        parts += [bf16(k), bf16(v * (0.05 + 0.1 * layer))]
    return np.stack(parts).tobytes()

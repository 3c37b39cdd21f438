"""T12: whoever holds the password of a role in Redis may run what is declared, and nothing else.

Every command that the server knows, subcommands included, is asked for on a real connection of each role, with keys
inside and outside of its pattern, on its own and from within a script. The list to compare with is `access.COMMANDS`.
"""

import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvstrata_metadata.store.access import ALWAYS, COMMANDS, KEY_PATTERN, Role
from kvstrata_metadata.store.scripts import Script, sources
from support.metadata.running_redis import running_redis_with
from support.runner.outcome import Outcome, Scale
from threats.redis_caller import RedisCaller, text

INSIDE: Final = KEY_PATTERN.replace("*", "{1.0}")
OUTSIDE: Final = "others:{1.0}"
PROBE: Final = "user probe on nopass resetkeys resetchannels -@all +ping"
"""As the chart writes it, for the readiness probe of its Redis."""
_STARTS: Final = Path(__file__).resolve().parents[2] / "charts" / "kvstrata" / "files" / "redis-start.sh"
RELOADS: Final = frozenset({"auth", "hello", "ping", "config|set"})
"""What the user may do by whom a Redis of ours reads its certificates anew; nobody but its starter has the password."""
CHARTS: Final = "reloader-of-the-chart"
GREEDY: Final = "user greedy on >greedy resetkeys ~* resetchannels -@all +keys " + " ".join(
    f"+{command}" for command in COMMANDS[Role.AGENT]
)
"""The control: an agent that may run one command more and reach every key."""
_RELAY: Final = "return redis.call(unpack(ARGV))"
"""A script of somebody's own."""
_NO_COMMAND: Final = ("no permissions to run", "can't run this command")
"""From the connection, and from within a script."""
_SWITCHED_OFF: Final = "command not allowed. If the enable-"
"""DEBUG and MODULE: the server's settings refuse them before its rules are asked; `rules` asks those."""
_NO_KEY: Final = ("no permissions to access", "can't access at least one of the keys")
RISKY: Final = {
    Role.AGENT: frozenset({"evalsha"}),
    Role.METADATA: frozenset({"evalsha", "info", "script|load", "script|exists"}),
}
"""What a role may run of the categories below: written down twice, so that a longer list does not pass unseen."""
_CATEGORIES: Final = ("admin", "dangerous", "pubsub", "scripting", "blocking")
_SANDBOX: Final = ("io", "require", "package", "dofile", "loadfile", "debug", "os.execute", "os.remove", "os.getenv")
_KEYLESS: Final = ("client|setname", "script|load", "script|exists")


@dataclass(frozen=True, slots=True)
class Command:
    """One command of the server."""

    name: str
    """In small letters; a subcommand after a bar, as ACL rules write it."""
    arity: int
    """Words at least, the name included."""
    first_key: int

    def words(self, key: str) -> list[str]:
        """Call it with `key` wherever a key may stand."""
        name = self.name.split("|")
        if self.name in ("evalsha", "evalsha_ro", "fcall", "fcall_ro", "eval", "eval_ro"):
            return [*name, "0" * 40, "1", key]
        return [*name, *[key] * max(self.arity - len(name), 0)]


@dataclass(frozen=True, slots=True)
class Caller:
    """One user of the server and what it is meant to be able to do."""

    user: str
    password: str
    declared: frozenset[str]


def run(scale: Scale) -> Outcome:
    """Try everything; the counts do not depend on the scale, for everything takes a second."""
    del scale
    with tempfile.TemporaryDirectory(prefix="kvstrata-t12-") as folder:
        for server in running_redis_with(Path(folder) / "redis", (PROBE, GREEDY, reloader())):
            with RedisCaller(server.port, "admin", "admin") as admin:
                known = commands(admin)
                rules_of = {user: rules(admin, user, known) for user in (*Role, "probe", CHARTS, "reloader", "greedy")}
                risky = {
                    text(name) for c in _CATEGORIES for name in admin.ask("COMMAND", "LIST", "FILTERBY", "ACLCAT", c)
                }
            access = {role: server.access(role) for role in Role}
            callers = [Caller(r, access[r].password, frozenset(COMMANDS[r])) for r in Role]
            callers += [Caller("probe", "probe", frozenset({"ping"})), Caller(CHARTS, CHARTS, RELOADS)]
            found = [(c, v) for c in callers for v in over_reach(server.port, c, known)]
            found += [
                (c, f"the rules say: {name}") for c in callers for name in (rules_of[c.user] ^ c.declared) - set(ALWAYS)
            ]
            found += [(callers[0], f"reloader: {name}") for name in rules_of["reloader"] - RELOADS - set(ALWAYS)]
            found += [(c, f"risky: {name}") for c in callers[:2] for name in c.declared & risky ^ RISKY[Role(c.user)]]
            found += [(callers[0], v) for v in strangers(server.port, known)]
            found += [(callers[1], v) for v in within_scripts(server.port, callers[1], known)]
            found += [(callers[0], v) for v in transitions(server.port, callers[0])]
            control = over_reach(server.port, Caller("greedy", "greedy", frozenset(COMMANDS[Role.AGENT])), known)
    n = len(known) * 2 * (len(callers) + 2) + len(Script)
    is_caught = any(" keys " in v for v in control) and any(OUTSIDE in v for v in control)
    is_caught = is_caught and rules_of["greedy"] - set(COMMANDS[Role.AGENT]) - set(ALWAYS) == {"keys"}
    violations = tuple(f"{caller.user}: {violation}" for caller, violation in found)
    return Outcome(n, "commands by caller and key", violations, is_caught, {"server_commands": len(known)})


def reloader() -> str:
    """Line of the ACL file that the chart's start script writes, with a password that is known here."""
    found = re.search(r'echo "(user reloader [^"]*)"', _STARTS.read_text(encoding="utf-8"))
    assert found is not None, "the chart's start script makes no user reloader"
    return found[1].replace("$password", CHARTS).replace("user reloader", f"user {CHARTS}")


def commands(admin: RedisCaller) -> list[Command]:
    """Every command of the server and every subcommand."""
    found = []
    for one in admin.ask("COMMAND"):
        subcommands = one[9]
        found += [_command(sub) for sub in subcommands] or [_command(one)]
        found += [_command(one)] if subcommands and one[1] == -1 else []
    return found


def _command(told: Any) -> Command:
    return Command(text(told[0]).lower(), abs(int(told[1])), int(told[3]))


def rules(admin: RedisCaller, user: str, known: list[Command]) -> frozenset[str]:
    """What the server's own rules let a user run, by its dry run."""
    asked = [("ACL", "DRYRUN", user, *command.words(INSIDE)) for command in known]
    said = zip(known, map(text, admin.ask_all(asked)), strict=True)
    allowed = {command.name for command, answer in said if not any(words in answer for words in _NO_COMMAND)}
    return frozenset(allowed)


def over_reach(port: int, caller: Caller, known: list[Command]) -> list[str]:
    """Ask for every command as `caller`; what was answered otherwise than declared."""
    wrong = [f"declared but unknown to the server: {name}" for name in caller.declared - {c.name for c in known}]
    for key in (INSIDE, OUTSIDE):
        for command in known:
            if command.name in ALWAYS and command.name not in caller.declared:
                continue  # Redis lets nobody refuse them; they give nothing.
            with RedisCaller(port, caller.user, caller.password) as connection:
                said = text(connection.ask(*command.words(key)))
            wrong += _judge(command, key, said, command.name in caller.declared)
    return wrong


def _judge(command: Command, key: str, said: str, is_declared: bool) -> Iterator[str]:  # noqa: FBT001  A fact.
    is_refused = any(words in said for words in (*_NO_COMMAND, _SWITCHED_OFF))
    is_key_refused = any(words in said for words in _NO_KEY)
    has_key = (command.first_key > 0 or command.name == "evalsha") and command.name not in _KEYLESS
    told = f"{command.name} with {key}: {said[:90]}"
    if is_refused == is_declared:
        yield f"{'refused' if is_refused else 'allowed'}: {told}"
    elif is_declared and has_key and is_key_refused != (key == OUTSIDE):
        yield f"key {'refused' if is_key_refused else 'allowed'}: {told}"


def strangers(port: int, known: list[Command]) -> Iterator[str]:
    """Ask without a password, with wrong ones, and with that of another role."""
    for command in known:
        if command.name in ALWAYS:
            continue
        with RedisCaller(port) as connection:
            said = text(connection.ask(*command.words(INSIDE)))
        if "NOAUTH" not in said and _SWITCHED_OFF not in said:
            yield f"a stranger: {command.name}: {said[:90]}"
    with RedisCaller(port) as connection:
        for login in (("",), ("default", ""), ("agent", ""), ("agent", "agent"), ("metadata", "x"), ("nobody", "x")):
            said = text(connection.ask("AUTH", *login))
            if said == "OK":
                yield f"a stranger logs in as {login}"


def within_scripts(port: int, caller: Caller, known: list[Command]) -> Iterator[str]:
    """Ask for every command from within a script of one's own, and for ways out of Lua.

    Only the role that installs transitions can load a script; Redis checks what it runs against its caller.
    """
    with RedisCaller(port, caller.user, caller.password) as connection:
        relay = text(connection.ask("SCRIPT", "LOAD", _RELAY))
        for command in known:
            for key in (INSIDE, OUTSIDE):
                said = text(connection.ask("EVALSHA", relay, 0, *command.words(key)))
                is_refused = any(w in said for w in (*_NO_COMMAND, _SWITCHED_OFF, "not allowed from script"))
                if command.name not in caller.declared and not is_refused:
                    yield f"in a script: {command.name}: {said[:90]}"
                if command.name in caller.declared and command.first_key > 0 and key == OUTSIDE and "ERR" not in said:
                    yield f"in a script: {command.name} with {key}: {said[:90]}"
        for name in _SANDBOX:
            sha = text(connection.ask("SCRIPT", "LOAD", f"return type({name})"))
            said = text(connection.ask("EVALSHA", sha, 0))
            if said != "nil" and "nonexistent global variable" not in said:
                yield f"in a script: {name} is a {said[:90]}"


def transitions(port: int, caller: Caller) -> Iterator[str]:
    """Run every installed transition on a key that is not ours: the pattern holds for scripts as well."""
    with RedisCaller(port, caller.user, caller.password) as connection:
        for script, source in sources().items():
            said = text(connection.ask("EVALSHA", source.sha, 1, OUTSIDE))
            if not any(words in said for words in _NO_KEY):
                yield f"{script} on {OUTSIDE}: {said[:90]}"

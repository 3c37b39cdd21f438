"""Changes of code find their one place by syntax, leave the rest of the text alone, and say why they do not fit."""

import ast

import pytest

from checks.mutation import Change, MutationError, mutate, scopes_with

pytestmark = pytest.mark.unit

SAMPLE = '''
"""Sample."""

import os

LIMIT: int = 3


class Table:
    """Rows."""

    @property
    def size(self) -> int:
        return len(self.rows)

    @size.setter
    def size(self, wanted: int) -> None:
        self.rows = self.rows[:wanted]

    async def take(self, names: list[str], *, most: int = 9) -> dict[str, int]:
        é, taken = f"{self.size} of {most}", {}  # ü: not the end of the line before
        for i, name in enumerate(names):  # At most: `most` of them.
            if (
                i >= most
                and name != "x"
            ):
                break
            elif not name:
                continue
            else:
                taken[name] = await self.find(name, default=i)
        try:
            os.sync()
        except (OSError, ValueError) as e:
            raise RuntimeError(é) from e
        finally:
            self.touch(); self.touch()
        with open(os.devnull) as null, self.lock:
            null.write("a" "b")
        return {k: v + 1 for k, v in taken.items() if v is not None} or (yield_ := taken)


@staticmethod
def outer(x, y=(1, 2)):
    def inner(z):
        return lambda: z[x:y] if x else -y

    return inner(max(i for i in y)) or inner(x)
'''


def changed(old: str, new: str, scope: str = "", source: str = SAMPLE) -> str:
    return mutate(source, Change(old, new, "sample", scope))


def error(old: str, new: str, scope: str = "", source: str = SAMPLE) -> str:
    with pytest.raises(MutationError) as raised:
        changed(old, new, scope, source)
    return str(raised.value)


def alike(one: str, other: str) -> bool:
    return ast.dump(ast.parse(one)) == ast.dump(ast.parse(other))


def test_an_expression_is_replaced_whatever_stands_around_it() -> None:
    assert changed("len(self.rows)", "a or b") == SAMPLE.replace("len(self.rows)", "(a or b)")
    assert alike(changed("v + 1", "a if b else c"), SAMPLE.replace("v + 1", "(a if b else c)"))
    assert alike(changed("(i for i in y)", "[0]"), SAMPLE.replace("max(i for i in y)", "max([0])"))
    assert alike(changed("y=(1, 2)".removeprefix("y="), "1, 2, 3"), SAMPLE.replace("(1, 2)", "(1, 2, 3)"))


def test_layout_comments_and_parentheses_do_not_count() -> None:
    for old in ('i >= most and name != "x"', "(i >= most  # Enough.\n and name != 'x')"):
        made = changed(old, "False")
        assert made.count("\n") == SAMPLE.count("\n") - 1
        assert "            if (\n                (False)\n            ):\n" in made


def test_statements_are_replaced_with_the_indent_of_their_place() -> None:
    made = changed("break", "if x:\n    y()\n\nbreak", "Table.take")

    assert "                if x:\n                    y()\n\n                break\n            elif" in made
    assert "                pass\n            elif" in changed("break", "")
    assert "    \n\n    return inner(" in changed("def inner(z):\n return lambda: z[x:y] if x else -y", "", "outer")
    assert changed("import os", "import os, sys").startswith('\n"""Sample."""\n\nimport os, sys\n')


def test_a_decorated_function_goes_with_its_decorators() -> None:
    made = changed("@property\ndef size(self) -> int:\n    return len(self.rows)", "size = 3", "Table")

    assert '    """Rows."""\n\n    size = 3\n\n    @size.setter\n' in made


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("for i, name in enumerate(names):", "for i, name in ():"),
        ("elif not name:", "elif name:"),
        ("except (OSError, ValueError) as e:", "except KeyError as e:"),
        ("with open(os.devnull) as null, self.lock:", "with self.lock:"),
        ("def inner(z):", "def inner(z: int = 3) -> int:"),
        ("class Table:", "class Table(dict):"),
    ],
)
def test_a_head_is_replaced_and_its_body_is_not(old: str, new: str) -> None:
    assert changed(old, new) == SAMPLE.replace(old, new)


def test_a_head_of_several_lines_ends_at_its_own_colon() -> None:
    old = 'if i >= most and name != "x":'

    assert "            if i:\n                break\n" in changed(old, "if i:")
    assert "stands there 0 times" in error("if not name:", "if name:")


def test_a_scope_is_a_qualified_name_and_holds_all_within() -> None:
    assert changed("self.rows", "None", "Table.size", SAMPLE.replace("self.rows[:wanted]", "[]")).count("(None)") == 1
    assert changed("z", "x", "outer.inner") != SAMPLE
    assert "no function or class Tabel there; alike: Table" in error("x", "y", "Tabel.size")
    assert "no function or class inner there" in error("x", "y", "inner")
    assert scopes_with(SAMPLE, Change("inner(x)", "0")) == ["outer"]
    assert scopes_with(SAMPLE, Change("self.touch()", "0")) == ["Table.take", "Table.take"]
    assert scopes_with(SAMPLE, Change("LIMIT: int = 3", "")) == [""]


def test_an_error_says_how_often_and_where_a_thing_stands() -> None:
    assert error("self.touch()", "") == "sample: old stands there 2 times (lines 37, 37), 1 wanted: self.touch()"
    assert error("if no:\n    pass", "", "outer") == "sample:outer: old stands there 0 times, 1 wanted: if no: ..."


def test_what_is_no_python_is_refused() -> None:
    assert "old does not parse" in error("a b", "c")
    assert "new does not parse" in error("LIMIT", "a b")
    assert "old is empty" in error("", "c")
    assert "head does not parse" in error("class Table:", "class 3:")
    assert "a head ends with a colon: pass" in error("class Table:", "pass")
    assert "does not parse" in error("m.z", "f(x) + 1", source="match x:\n    case m.z:\n        pass")


def test_what_an_indent_would_change_is_refused() -> None:
    assert "a string of several lines" in error("break", 'x = """a\nb"""\nbreak')
    assert "an elif is no statement by itself" in error(
        "if not name:\n continue\nelse:\n taken[name] = await self.find(name, default=i)", ""
    )


def test_parts_of_f_strings_are_no_places() -> None:
    assert "stands there 0 times" in error("self.size", "0", "Table.take")
    assert 'é, taken = ("x"), {}' in changed('f"{self.size} of {most}"', '"x"')


def test_text_stands_once_in_its_file() -> None:
    assert mutate("a = 1\nb = 1\n", Change("a = 1\n", "", file="x.lua")) == "b = 1\n"
    with pytest.raises(MutationError, match=r"x\.lua: old stands there 2 times, 1 wanted: = 1"):
        mutate("a = 1\nb = 1\n", Change("= 1", "= 2", file="x.lua"))


def test_whatever_is_replaced_by_itself_leaves_the_program_as_it_was() -> None:
    replaced, refused = 0, set()
    for node in ast.walk(ast.parse(SAMPLE)):
        if isinstance(node, ast.expr | ast.stmt) and not isinstance(node, ast.Slice | ast.Starred):
            same = ast.unparse(node)
            try:
                made = changed(same, same)
            except MutationError as e:
                refused.add("an elif" if "an elif" in str(e) else str(e).split(" times")[0].split(": ")[1])
            else:
                assert alike(made, SAMPLE)
                replaced += 1

    # In several places; in none are targets, which are no expressions to look for, and parts of f-strings.
    assert refused == {f"old stands there {n}" for n in (0, 2, 3, 4, 5, 7)} | {"an elif"}
    assert replaced > 60

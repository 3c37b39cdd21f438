"""Laws of the watched store: it equals what the server holds, and says so exactly when a value changed."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_kube.typed_store import Known, Seen

pytestmark = pytest.mark.unit

Json = dict[str, Any]
NAMES = st.sampled_from("abcd")
VALUES = st.integers(0, 2)
STEPS = st.lists(
    st.tuples(st.just("put"), NAMES, VALUES)
    | st.tuples(st.just("drop"), NAMES, st.just(0))
    | st.tuples(st.just("list"), st.dictionaries(NAMES, VALUES), st.just(0)),
    max_size=30,
)


def obj(name: str, value: Any, namespace: str = "") -> Json:
    return {"metadata": {"name": name, "namespace": namespace}, "value": value}


def seen(store: Known[int], found: Json) -> Seen[int]:
    return store.read(msgspec.json.encode(found))


def parse(found: Json) -> int:
    return int(found["value"])


@given(STEPS)
def test_a_store_equals_a_dictionary_and_tells_every_change_once(steps: list[Any]) -> None:
    told: list[dict[str, int]] = []
    store: Known[int] = Known("Thing", parse, lambda: told.append({}))
    model: dict[str, int] = {}
    for verb, what, value in steps:
        before, told_before, was_synced = dict(model), len(told), store.is_synced
        if verb == "put":
            model[what] = value
            store.put(seen(store, obj(what, value)))
        elif verb == "drop":
            model.pop(what, None)
            gone = seen(store, obj(what, value))
            store.remove(gone.key, gone.uid)
        else:
            model = dict(what)
            store.take([seen(store, obj(n, v)) for n, v in what.items()], "")
        assert {n: store.get(n) for n in "abcd" if store.get(n) is not None} == model
        is_first_list = store.is_synced and not was_synced
        assert (len(told) > told_before) == (model != before or is_first_list)
        assert store.is_synced == (was_synced or verb == "list")


@pytest.mark.parametrize("bad", [{}, {"value": "x"}, {"value": None}, {"value": {}}])
def test_what_cannot_be_parsed_counts_as_absent(bad: Json, caplog: pytest.LogCaptureFixture) -> None:
    store: Known[int] = Known("Thing", parse, lambda: None)
    store.put(seen(store, obj("a", 1)))
    store.put(seen(store, {"metadata": {"name": "a"}} | bad))

    assert store.get("a") is None
    assert "object ignored" in caplog.text


def test_equal_names_in_two_namespaces_are_two_objects() -> None:
    store: Known[int] = Known("Thing", parse, lambda: None)
    store.put(seen(store, obj("a", 1, "x")))
    store.put(seen(store, obj("a", 2, "y")))

    assert (store.get("a", "x"), store.get("a", "y"), store.get("a")) == (1, 2, None)
    assert sorted(store) == [1, 2]

"""`pilotfish top`: what a status says is shown, in the order that was asked for, whatever is missing."""

from __future__ import annotations

import io
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pilotfish_operator.top import NUMBERS, TITLES, Row, View, drawn, row


def model(name: str, load: float | None = None, **speculation: Any) -> dict[str, Any]:
    status: dict[str, Any] = {"replicas": 2, "readyReplicas": 1, "speculation": speculation}
    if load is not None:
        status["load"] = {"concurrency": load, "tokensPerSecond": 10 * load}
    status["conditions"] = [{"type": "Ready", "status": "True", "message": f"[{name}] serves"}]
    return {"metadata": {"namespace": "space", "name": name}, "status": status}


def shown(rows: list[Row], view: View) -> str:
    console = Console(width=220, file=io.StringIO())
    console.print(drawn(rows, view))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


ROWS = [
    row(model("a", 3.0, speedup=1.2, desired={"numSteps": 5, "topK": 1, "numDraftTokens": 6})),
    row(model("b", 12.5, speedup=1.0, effective={"numSteps": 0}, reason="Chose plain decoding.")),
    row({"metadata": {"namespace": "space", "name": "new"}}),
]


def names(view: View) -> list[str]:
    return [str(one.cells["model"]).removeprefix("space/") for one in view.order(ROWS)]


def test_every_column_sorts_and_what_is_not_known_comes_last() -> None:
    view = View()
    assert names(view) == ["a", "b", "new"]
    view = view.after("s", ROWS)
    assert TITLES[view.sort] == "load"
    assert names(view) == ["b", "a", "new"]
    assert names(view.after("r", ROWS)) == ["a", "b", "new"]
    for _ in TITLES:
        view = view.after("s", ROWS)
    assert TITLES[view.sort] == "load"


def test_one_is_opened_and_stays_chosen_when_the_order_changes() -> None:
    view = View().after("j", ROWS).after("\x1b[B", ROWS).after("\r", ROWS)
    assert view.selected == "space/b"
    text = shown(ROWS, view.after("s", ROWS))
    assert "[b] serves" in text
    assert "[a] serves" not in text
    assert "Chose plain decoding." in text
    assert "[b] serves" not in shown(ROWS, view.after("\n", ROWS))


def test_numbers_settings_and_gaps_are_shown() -> None:
    lines = shown(ROWS, View()).splitlines()
    assert [word for word in TITLES if word not in lines[0]] == []
    assert "5/1/6, -" in lines[1]
    assert "12.5" in lines[2]
    assert "0/1/1, -" in lines[2]
    assert lines[3].split()[:2] == ["space/new", "?"]


@given(st.lists(st.sampled_from(["s", "r", "j", "k", "\r", "\x1b[A", "x", "\x1b"]), max_size=40), st.booleans())
def test_no_keys_break_the_view(keys: list[str], empty: bool) -> None:
    rows, view = ([] if empty else ROWS), View()
    for key in keys:
        view = view.after(key, rows)
        assert len(view.order(rows)) == len(rows)
        assert 0 <= view.sort < len(TITLES)
    assert shown(rows, view)
    assert view.after("q", rows).ended


def test_the_columns_of_numbers_exist() -> None:
    assert set(NUMBERS) < set(TITLES)

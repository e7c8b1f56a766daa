"""A table says the same in a terminal and on a page."""

import io

from mp_agent.output import Console
from mp_agent.report import terminal
from mp_agent.report.content import Cell, Curve, Plot, Table


def printed(table: Table, width: int, *, single: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as captured:
        console.print(terminal.table(table, single=single))
    return captured.get()


def test_numbers_are_right_aligned_and_names_are_no_markup():
    table = Table(("name", "value"), [("[b]a[/b]", "1"), ("b", Cell("1000", "bad"))], marked=[0])
    lines = [line.rstrip() for line in printed(table, 40).splitlines()]
    assert lines == ["name      value", "[b]a[/b]      1", "b          1000"]


def test_what_does_not_fit_is_folded_or_visibly_cut():
    table = Table(("name", "value"), [("n" * 30, "1")])
    assert printed(table, 20).count("n") == 31
    assert "…" in printed(table, 20, single=True)


def test_a_plot_is_described_for_those_who_do_not_see_it():
    curves = [Curve("first", [1.0, None, 3.0]), Curve("second", [None] * 3)]
    plot = Plot(id="loss", title="Loss", caption="", curves=curves, marks={1: "NaN or Inf"})
    assert plot.description == (
        "Loss: first: smallest 1, largest 3, last 3; second: no value; 1 marked"
    )

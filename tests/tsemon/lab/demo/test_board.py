"""What the demo says of an incident."""

import io

import pytest
from rich.console import Console

from tsemon import wire
from tsemon.lab.demo.board import Board, Row
from tsemon_client import Client, Incident

SUMMARY = "Tokens become the same over depth: token_diversity of the last layer is 1.53e-07 (at most 0.0005); more."


@pytest.mark.parametrize("state", ["open", "recovered"])
def test_an_incident_in_the_terminal_is_one_line_of_its_rule_and_what_is_wrong(state):
    output = io.StringIO()
    with Client("http://127.0.0.1:9") as client:
        board = Board(client, [], num_steps=100, console=Console(file=output, width=200))
        board.tell(wire.Incident("1", "tse", "critical", "escalation", 45, 35, [5, 47], state, SUMMARY, {}, False))
    assert output.getvalue() == f"incident {state}: escalation. Tokens become the same over depth\n"


class TestTheTable:
    def test_names_the_incidents_and_fits_80_columns(self):
        output = io.StringIO()
        known = {"blocks": None, "where": None, "left_step": 20, "state": "open", "ended_step": None}
        incidents = [
            Incident.model_construct(rule="escalation", **known | {"blocks": (5, 47), "where": "blocks 5 to 47"}),
            Incident.model_construct(rule="loss-spike", **known | {"state": "recovered", "ended_step": 60}),
        ]
        rows = [
            Row("digits-de-escalated", "1", 1200, 2.3021, (0.9123, 0.5678, 2.671e-09), incidents),
            Row("digits-post-norm"),
        ]
        with Client("http://127.0.0.1:9") as client:
            console = Console(file=output, width=80)
            console.print(Board(client, rows, num_steps=100, console=console)._render())
        shown = " ".join(output.getvalue().split())
        assert "token diversity by depth" in shown
        assert "│ 1200 │ digits-de-escalated │ 2.3021 │ 0.9123 │ 0.5678 │ 2.671e-09 │" in shown
        assert (
            "digits-de-escalated: escalation in blocks 5 to 47 since step 20, "
            "loss-spike since step 20, recovered at 60" in shown
        )
        assert "digits-post-norm: no incident" in shown

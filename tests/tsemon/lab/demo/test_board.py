"""What the demo says of an alert."""

import io

import pytest
from rich.console import Console

from tsemon import wire
from tsemon.lab.demo.board import Board, Row
from tsemon_client import Alert, Client

SUMMARY = "Tokens become the same over depth: token_diversity of the last layer is 1.53e-07 (at most 0.0005); more."


@pytest.fixture
def tell():
    """Have the board tell of an alert; what it printed."""
    output = io.StringIO()
    with Client("http://127.0.0.1:9") as client:
        board = Board(client, [], num_steps=100, console=Console(file=output))

        def told(state, resolved_step):
            board.tell(wire.Alert("1", "escalation", "tse", "critical", state, 35, 45, resolved_step, SUMMARY, {}, {}))
            return output.getvalue()

        yield told


class TestAnAlertInTheTerminal:
    def test_is_one_line_of_its_rule_its_step_and_what_is_wrong(self, tell):
        assert tell("firing", None) == "firing at step 45: escalation. Tokens become the same over depth\n"

    @pytest.mark.parametrize(("step", "at"), [(60, " at step 60"), (None, "")])
    def test_names_the_step_of_its_end_where_that_is_known(self, tell, step, at):
        assert tell("resolved", step) == f"resolved{at}: escalation. Tokens become the same over depth\n"


class TestTheTable:
    def test_names_the_rules_that_fired_and_fits_80_columns(self):
        output = io.StringIO()
        fired = [
            Alert.model_construct(rule="states-collapse", firing_step=20, state="firing"),
            Alert.model_construct(
                rule="vanishing-gradient", firing_step=45, state="resolved", resolved_step=60, resolved_reason="clear"
            ),
        ]
        rows = [
            Row("digits-de-escalated", "1", 1200, 2.3021, (0.9123, 0.5678, 2.671e-09), fired),
            Row("digits-post-norm"),
        ]
        with Client("http://127.0.0.1:9") as client:
            console = Console(file=output, width=80)
            console.print(Board(client, rows, num_steps=100, console=console)._render())
        shown = " ".join(output.getvalue().split())
        assert "token diversity by depth" in shown
        assert "│ 1200 │ digits-de-escalated │ 2.3021 │ 0.9123 │ 0.5678 │ 2.671e-09 │" in shown
        assert "digits-de-escalated: states-collapse since 20, vanishing-gradient at 45, resolved at 60" in shown
        assert "digits-post-norm: no alerts" in shown

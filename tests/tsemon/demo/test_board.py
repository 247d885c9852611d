"""What the demo says of an alert."""

import io

import pytest
from rich.console import Console

from tsemon.demo.board import Board
from tsemon.wire import Alert
from tsemon_client import Client

SUMMARY = "Tokens become the same over depth: token_diversity of the last layer is 1.53e-07 (at most 0.0005); more."


@pytest.fixture
def tell():
    """Have the board tell of an alert; what it printed."""
    output = io.StringIO()
    with Client("http://127.0.0.1:9") as client:
        board = Board(client, [], num_steps=100, console=Console(file=output))

        def told(state, resolved_step):
            board.tell(Alert("1", "escalation", "tse", "critical", state, 35, 45, resolved_step, SUMMARY, {}, {}))
            return output.getvalue()

        yield told


class TestAnAlertInTheTerminal:
    def test_is_one_line_of_its_rule_its_step_and_what_is_wrong(self, tell):
        assert tell("firing", None) == "firing at step 45: escalation. Tokens become the same over depth\n"

    @pytest.mark.parametrize(("step", "at"), [(60, " at step 60"), (None, "")])
    def test_names_the_step_of_its_end_where_that_is_known(self, tell, step, at):
        assert tell("resolved", step) == f"resolved{at}: escalation. Tokens become the same over depth\n"

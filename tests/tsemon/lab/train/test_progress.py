import io

import pytest
from rich.console import Console

from tsemon.lab.train.progress import Board


def shown(is_terminal):
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=120, highlight=False)
    with Board(console, num_steps=20, first_step=10, unit="tokens") as board:
        board.show(20, 2.5, 1e-3, rows_per_step=64)
        board.show_evaluation(20, {"validation_loss": 2.25, "bits_per_byte": 3.5})
    return console.file.getvalue()


class TestTheBoard:
    @pytest.mark.parametrize("is_terminal", [False, True])
    def test_tells_loss_rate_and_speed(self, is_terminal):
        assert "loss 2.5000  lr 1.00e-03  " in shown(is_terminal)
        assert "tokens/s" in shown(is_terminal)
        assert "step 20/20  validation loss 2.2500, bits per byte 3.5000\n" in shown(is_terminal)

    def test_is_a_bar_in_a_terminal_alone(self):
        assert "━" in shown(True)
        assert "\x1b" not in shown(False)
        assert shown(False).splitlines()[0].startswith("step 20/20  loss 2.5000")

import random

from tsemon.tools.importing.joining import frames_of, joined
from tsemon.tools.importing.naming import Naming, plan_names
from tsemon.tools.importing.source import Notes, Row


def rows_of(*events):
    """(step, name, value) as they were logged."""
    return [
        Row(number, step, 100.0 + number, [(name, value)], number + 1)
        for number, (step, name, value) in enumerate(events)
    ]


def frames(rows, **options):
    names = dict.fromkeys(name for row in rows for name, _ in row.values)
    plan = plan_names(names, Naming(), Notes(), most_in_frame=1000)
    return [frame for step in joined(rows, **options) for _, frame in frames_of(step, plan)]


class TestJoining:
    def test_makes_one_frame_of_each_step_in_the_order_of_steps(self):
        rows = rows_of((5, "loss", 1.0), (0, "loss", 3.0), (5, "acc", 0.5), (0, "acc", 0.1))
        assert [(frame.step, dict(frame.scalars)) for frame in frames(rows)] == [
            (0, {"loss": 3.0, "acc": 0.1}),
            (5, {"loss": 1.0, "acc": 0.5}),
        ]

    def test_folds_layers_into_an_array_and_says_nan_of_those_that_are_not_there(self):
        rows = rows_of((0, "layers.0.x", 1.0), (0, "layers.2.x", 3.0))
        (frame,) = frames(rows)
        assert [str(value) for value in frame.layers["x"].tolist()] == ["1.0", "nan", "3.0"]

    def test_takes_the_later_of_two_values(self):
        (frame,) = frames(rows_of((0, "loss", 1.0), (0, "loss", 2.0)))
        assert frame.scalars == {"loss": 2.0}


class TestAFrame:
    def test_has_a_name_that_stands_for_what_it_holds_however_long_the_log_has_become(self):
        """Logs in any order, cut anywhere: the same name is never given to two different frames."""
        for seed in range(40):
            chance = random.Random(seed)
            events = [(chance.randrange(12), chance.choice("abcdef"), chance.random()) for _ in range(150)]
            rows = rows_of(*events)
            cuts = [frames(rows[:end], values_of_piece=20) for end in (*sorted(chance.sample(range(150), 5)), 150)]
            known = {}
            for frame in (frame for cut in cuts for frame in cut):
                assert known.setdefault(frame.seq, frame) == frame

    def test_is_there_for_every_value_once_all_is_imported(self):
        chance = random.Random(1)
        rows = rows_of(*((chance.randrange(12), chance.choice("abcdef"), chance.random()) for _ in range(300)))
        stored = {frame.seq: frame for end in (70, 200, 300) for frame in frames(rows[:end], values_of_piece=20)}
        kept = {(frame.step, name, value) for frame in stored.values() for name, value in frame.scalars.items()}
        # Of two values of one name at one step, in one piece, the later counts.
        newest = {(row.step, row.values[0][0]): row.values[0][1] for row in rows}
        assert {(step, name, value) for (step, name), value in newest.items()} <= kept

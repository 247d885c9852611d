import pytest

from tsemon.errors import InvalidArgument
from tsemon.tools.importing.naming import Naming, plan_names
from tsemon.tools.importing.source import Notes
from tsemon.wire import METRIC_NAME


def plan(*names, notes=None, most_in_frame=1000, **said):
    naming = Naming(tuple(said.get("patterns", ())), tuple(said.get("same", {}).items()))
    return plan_names(names, naming, notes or Notes(), most_in_frame=most_in_frame)


def place(name, **said):
    found = plan(name, **said).places[name]
    return found.metric, found.entry


class TestTheBuiltInFold:
    @pytest.mark.parametrize(
        ("name", "metric", "layer"),
        [
            ("layers.12.attn.entropy", "attn.entropy", 12),
            ("train/layers.12.attn.entropy", "train/attn.entropy", 12),
            ("model.layers.3.self_attn.q_proj.grad", "model.self_attn.q_proj.grad", 3),
            ("transformer.h.0.mlp.norm", "transformer.mlp.norm", 0),
            ("encoder/block_7/norm", "encoder/norm", 7),
            ("entropy/layer_07", "entropy", 7),
            ("entropy/layer7", "entropy", 7),
            ("blocks.4", "layer", 4),
        ],
    )
    def test_takes_the_layer_out_of_the_name(self, name, metric, layer):
        assert place(name) == (metric, layer)

    @pytest.mark.parametrize("name", ["loss", "top_5", "flayer.3", "layers", "alpha.h3", "layernorm.3.x", "lr/group0"])
    def test_leaves_names_alone_that_only_have_a_number(self, name):
        assert place(name)[1] is None

    def test_has_as_many_blocks_as_the_deepest_layer_needs(self):
        assert plan("layers.0.a", "layers.5.a").num_blocks == 6


class TestPatterns:
    def test_are_written_with_a_place_for_the_layer_and_one_for_the_name(self):
        assert place("attn_entropy_L12", patterns=["attn_{name}_L{layer}"]) == ("entropy", 12)

    def test_may_be_without_a_name(self):
        assert place("entropy@12", patterns=["entropy@{layer}"]) == ("entropy_", 12)

    def test_may_be_regular_expressions(self):
        assert place("L3|entropy", patterns=[r"L(?P<layer>\d+)\|(?P<name>\w+)"]) == ("entropy", 3)

    def test_go_before_the_built_in_one(self):
        assert place("layers.1.experts.7.load", patterns=["layers.1.experts.{layer}.{name}"]) == ("load", 7)

    @pytest.mark.parametrize("pattern", ["no_layer.{name}", "(?P<layer>", "(?P<name>a)"])
    def test_are_refused_where_they_say_of_no_layer(self, pattern):
        with pytest.raises(InvalidArgument, match="--pattern"):
            Naming((pattern,))


class TestNamesOfTheCatalogue:
    def test_are_given_where_the_user_says_so(self):
        assert place("layers.2.attn.entropy", same={"attn.entropy": "attention_entropy"}) == ("attention_entropy", 2)
        assert place("val/nll", same={"val/nll": "loss"}) == ("loss", None)

    @pytest.mark.parametrize(("name", "metric"), [("train/loss", "loss"), ("loss", "loss"), ("lr", "learning_rate")])
    def test_are_given_where_it_is_surely_the_same(self, name, metric):
        assert place(name) == (metric, None)

    def test_are_not_given_to_what_may_be_something_else(self):
        notes = Notes()
        found = plan("layers.0.effective_rank", "step_size", notes=notes).places
        assert [place.metric for place in found.values()] == ["imported/effective_rank", "imported/step_size"]
        assert "--map effective_rank=effective_rank says that they are the same" in notes.remarks[0]

    def test_come_back_from_what_the_mirrors_wrote(self):
        assert place("tsemon/attention_entropy/07") == ("attention_entropy", 7)
        assert place("tsemon/loss") == ("loss", None)
        assert place("tsemon/attention_entropy/mean") == ("tsemon/attention_entropy/mean", None)

    def test_leave_room_for_what_enters_the_first_block(self):
        found = plan("layers.0.rms", "layers.1.rms", same={"rms": "hidden_rms"})
        assert [place.entry for place in found.places.values()] == [1, 2]
        assert (found.num_blocks, found.lengths) == (2, {"hidden_rms": 3})

    def test_of_a_mirror_keep_their_entries(self):
        found = plan("tsemon/hidden_rms/00", "tsemon/hidden_rms/01", "tsemon/hidden_rms/02")
        assert (found.num_blocks, found.lengths) == (2, {"hidden_rms": 3})


class TestHostileNames:
    @pytest.mark.parametrize(
        "name",
        ["<script>alert(1)</script>", "потери", "3d loss", "a" * 300, "", "\ud800", "a\nb", "../../etc/passwd", "{}"],
    )
    def test_become_names_that_a_metric_may_have(self, name):
        import re

        assert re.fullmatch(METRIC_NAME, place(name)[0])

    def test_stay_different(self):
        names = ["loss (train)", "loss [train]", "потери", "ошибка", "a" * 200 + "b", "a" * 200 + "c", "x" * 128 + "y"]
        found = plan(*names).places
        assert len({place.metric for place in found.values()}) == len(names)

    def test_that_would_become_the_same_are_told(self):
        notes = Notes()
        metric = plan("loss", "x", same={"x": "loss"}, notes=notes).places["x"].metric
        assert metric != "loss"
        assert notes.remarks == [f"x is called {metric} here, since loss is called loss; --map gives it another name"]

    def test_do_not_change_places_when_more_come(self):
        names = ["loss (train)", "loss [train]", "loss", "train/loss", "layers.0.a b", "layers.0.a_b"]
        few = plan(*names[:3]).places
        many = plan(*names).places
        assert {name: many[name] for name in few} == few
        assert len({place[:2] for place in many.values()}) == len(names)

    @pytest.mark.parametrize("number", ["1000000000", "10000", "9" * 5000, "0" * 5000 + "10001"])
    def test_of_layers_beyond_all_bounds_are_left_out_and_told(self, number):
        notes = Notes()
        found = plan("loss", f"layers.{number}.x", notes=notes)
        assert (list(found.places), found.num_blocks) == (["loss"], 0)
        assert notes.left_out()[0].startswith("left out, layers beyond the 10000 that a run may have: layers.")

    def test_with_a_number_that_is_none_of_a_layer_make_no_long_arrays(self):
        notes = Notes()
        found = plan("layers.0.x", "layers.1.x", "layers.4096.x", notes=notes)
        assert found.num_blocks == 2
        assert notes.left_out() == ["left out, layers far beyond all others: layers.4096.x"]

    def test_beyond_what_a_frame_holds_go_into_further_frames(self):
        found = plan("a", "b", "c", "layers.0.d", most_in_frame=2).places
        assert [place.band for place in found.values()] == [0, 0, 1, 0]

    def test_beyond_what_a_run_may_have_are_left_out_and_told(self):
        notes = Notes()
        found = plan(*(f"m{number}" for number in range(10_002)), notes=notes)
        assert len(found.places) == 10_000
        assert notes.left_out() == ["left out, metrics beyond 10000: m10000, m10001"]

import numpy as np
import pytest
import torch

from tsemon.lab.reproduce import deep_vit
from tsemon.lab.reproduce.observing import Frame, Recording
from tsemon.lab.reproduce.training import Training
from tsemon.lab.train import digits, image_batches
from tsemon.measures import token_diversity
from tsemon.models import VisionTransformer

TINY = deep_vit.Sizes(
    preset="digits-48",
    depth=6,
    learning_rates=(1e-4, 1e-4, 1e-4),
    num_steps=12,
    num_xavier_steps=5,
    num_evaluations=2,
    every=4,
)


@pytest.fixture(scope="module")
def trainings():
    return {name: deep_vit.trained(name, TINY) for name in deep_vit.VARIANTS}


def first_images():
    data = digits()
    return next(image_batches(data.train_images, data.train_labels, TINY.batch, seed=0))[0]


class TestAVariant:
    def test_is_measured_from_its_first_batch_on(self, trainings):
        torch.manual_seed(0)
        model = VisionTransformer.from_preset("digits-48", depth=6)
        outputs = []
        model.blocks[-1].register_forward_hook(lambda _, __, output: outputs.append(output))
        model(first_images())
        steps, t_div = trainings["post-norm"].recording.series("token_diversity", -1)
        assert steps.tolist() == [0, 4, 8]
        assert t_div[0] == pytest.approx(token_diversity(outputs[0]).mean().item(), rel=1e-4)  # float32, other sums

    def test_is_measured_before_its_operator_which_leaves_nothing_of_the_mean(self, trainings):
        t_sim = deep_vit.last(trainings["de-escalated"], "token_similarity")
        assert (t_sim > 1e-4).all()

    def test_has_a_loss_for_each_step_and_an_accuracy_for_each_evaluation(self, trainings):
        for training in trainings.values():
            assert training.losses.shape == (12,)
            steps, accuracies = training.evaluations
            assert steps.tolist() == [6, 12]
            assert ((accuracies >= 0) & (accuracies <= 1)).all()

    def test_is_the_same_each_time(self, trainings):
        again = deep_vit.trained("post-norm", TINY)
        assert again.losses.tolist() == trainings["post-norm"].losses.tolist()


class TestXaviersWeights:
    def test_have_their_bound_in_each_matrix(self):
        torch.manual_seed(0)
        model = VisionTransformer.from_preset("digits-48", depth=1)
        deep_vit.start_from_xavier(model)
        query, key, value = model.blocks[0].attention.to_query_key_value.weight.chunk(3)
        for weight in (query, key, value, model.blocks[0].feed_forward.expand.weight, model.head.weight):
            # The largest of 640 uniform draws or more is within 5 % of the bound sqrt(6 / (ins + outs)).
            bound = (6 / sum(weight.shape)) ** 0.5
            assert 0.95 * bound < weight.abs().max() <= bound

    def test_make_the_gradient_grow_backwards(self, trainings):
        explosive = deep_vit.trained("de-escalated", TINY, is_xavier=True)
        assert deep_vit.backward_growth(explosive) > deep_vit.backward_growth(trainings["de-escalated"])


class TestThePage:
    def test_compares_all_variants(self, trainings):
        xavier = {name: trainings[name] for name in ("post-norm", "de-escalated")}
        assert len(deep_vit.claims(TINY, trainings, xavier)) == 6
        table = deep_vit.training_table(TINY, trainings)
        assert [row[0] for row in table.rows] == list(deep_vit.VARIANTS)
        mean_of_first_two = trainings["post-norm"].losses[:2].mean()
        assert table.rows[0][2].startswith(f"{mean_of_first_two:.3f}, ")


def by_hand(loss, *, diversity=(1.0, 1.0), gradients=(1.0, 1.0)):
    """A training that did not take place: its loss, the last block's diversity by sample, the blocks' gradients."""
    frames = [
        Frame(step=i, scalars={}, layers={"token_diversity": np.array([t]), "grad_norm": np.array(gradients)}, heads={})
        for i, t in enumerate(diversity)
    ]
    losses = np.full(TINY.num_steps, loss)
    return Training(losses=losses, recording=Recording(None, frames), evaluations=(np.array([1]), np.array([0.5])))


class TestTheVerdicts:
    def test_are_yes_where_all_is_as_the_paper_says(self):
        trainings = {
            "post-norm": by_hand(deep_vit.CHANCE, diversity=(1e-2, 1e-3)),
            "pre-norm": by_hand(1.0),
            "de-escalated": by_hand(0.9),
        }
        claims = deep_vit.claims(TINY, trainings, {"de-escalated": by_hand(0.9)})
        assert [claim.agrees for claim in claims] == ["yes"] * 6

    def test_are_no_where_nothing_is(self):
        trainings = {
            "post-norm": by_hand(1.0, diversity=(0.1, 0.2), gradients=(100, 1)),
            "pre-norm": by_hand(2.25),
            "de-escalated": by_hand(2.3, diversity=(0.9, 0.1), gradients=(2, 1)),
        }
        claims = deep_vit.claims(TINY, trainings, {"de-escalated": by_hand(2.3, gradients=(2, 1))})
        assert [claim.agrees for claim in claims] == ["no"] * 6

from dataclasses import replace

import pytest

from tsemon.lab.reproduce.result import Claim, Result
from tsemon.lab.reproduce.seeds import mean_sentence, numbers_of, over_seeds


def result(seen, agrees="yes"):
    return Result(settings={"dtype": "float32"}, claims=[Claim(paper="It grows.", seen=seen, agrees=agrees)], plots={})


def of_seeds(*results):
    return over_seeds(results[0], [numbers_of(one) for one in results[1:]])


class TestASentenceOfSeveralSeeds:
    @pytest.mark.parametrize(
        ("seeds", "mean"),
        [
            (("t_sim 0.25 after block 10", "t_sim 0.35 after block 10"), "t_sim 0.30 ± 0.07 after block 10"),
            (("in 9 of 9 blocks", "in 7 of 9 blocks"), "in 8.0 ± 1.4 of 9 blocks"),
            (("nan at first", "0.5 at first"), "nan ± nan at first"),
            (("it is 2e-05.", "it is 4e-05."), "it is 3e-05 ± 1e-05."),
            (("it is 0.0004.", "it is 2e-05."), "it is 2e-04 ± 3e-04."),
            (("+0.10, -0.10", "+0.30, -0.30"), "+0.20 ± 0.14, -0.20 ± 0.14"),
            (("97.5% (xi_1 of Eq. 13)", "98.5% (xi_1 of Eq. 13)"), "98.0 ± 0.7% (xi_1 of Eq. 13)"),
            (("1.5 to 2.5, nan", "1.5 to 2.5, nan"), "1.5 to 2.5, nan"),
        ],
    )
    def test_has_means_where_numbers_differ(self, seeds, mean):
        assert mean_sentence(seeds) == mean

    def test_is_all_of_them_if_words_differ(self):
        assert mean_sentence(["In no layer.", "In layer 2."]) == "Seed 0: In no layer. Seed 1: In layer 2."


class TestAResultOverSeeds:
    def test_has_the_verdict_of_all_seeds(self):
        (claim,) = of_seeds(result("by 1.0"), result("by 2.0"), result("by 3.0")).claims
        assert (claim.paper, claim.seen, claim.agrees) == ("It grows.", "by 2.0 ± 1.0", "yes")

    def test_agrees_in_part_if_seeds_do_not_agree(self):
        (claim,) = of_seeds(result("by 1.0."), result("by 2.0.", "no")).claims
        assert (claim.seen, claim.agrees) == ("by 1.5 ± 0.7. By seed: yes, no.", "in part")

    def test_says_how_many_seeds_there_were(self):
        settings = of_seeds(result("1"), result("2")).settings
        assert settings["dtype"] == "float32"
        assert settings["seeds"].startswith("0 to 1;")
        assert of_seeds(result("1")).settings["seeds"] == "0"

    def test_has_the_readings_of_all_seeds(self):
        first, second = (
            replace(result("1"), claims=[Claim(paper="It grows.", seen="1", reading=f"by {by}", agrees="yes")])
            for by in ("1.0", "3.0")
        )
        assert of_seeds(first, second).claims[0].reading == "by 2.0 ± 1.4"

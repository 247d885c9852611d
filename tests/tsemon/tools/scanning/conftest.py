import pytest
import torch

from tests import zoo


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A tiny T5 and a tiny GPT-2, saved by their own library, by torch and by safetensors while they train.

    {name: folder}, and the parameters that were saved, by step, kept apart.
    """
    root = tmp_path_factory.mktemp("trained")
    kept = {}
    for make, rate in ((zoo.t5, 1e-2), (zoo.gpt2, 1e-2)):
        torch.manual_seed(0)
        model, run = make()
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
        name = make.__name__
        for step in range(11):
            kept[name, step * 10] = {key: value.clone() for key, value in model.named_parameters()}
            model.save_pretrained(root / name / f"checkpoint-{step * 10}")
            torch.save(optimizer.state_dict(), root / name / f"checkpoint-{step * 10}" / "optimizer.pt")
            (root / f"{name}-pt").mkdir(exist_ok=True)
            torch.save({"model": model.state_dict(), "step": step * 10}, root / f"{name}-pt" / f"m{step}.pt")
            logits = run()
            torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), zoo.ids(tokens=logits.shape[1]).flatten()
            ).backward()
            optimizer.step()
            optimizer.zero_grad()
    return root, kept

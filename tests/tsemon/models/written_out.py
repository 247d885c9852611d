"""The papers' equations for one sequence x (T, D), slowly, with the weights of the module that is tested."""

import math

import torch

# Some tens of float64 operations on numbers near 1, each off by 1e-16.
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def attention(module, x, causal=False, scale=None):
    """P X W, head by head, softmax by hand."""
    tokens, width = x.shape
    size = width // module.heads
    scale = 1 / math.sqrt(size) if scale is None else scale
    query, key, value = (x @ module.to_query_key_value.weight.T + module.to_query_key_value.bias).split(width, 1)
    heads = []
    for head in range(module.heads):
        cut = slice(head * size, (head + 1) * size)
        rows = []
        for i in range(tokens):
            seen = i + 1 if causal else tokens
            weights = (scale * query[i, cut] @ key[:seen, cut].T).exp()
            rows.append(weights / weights.sum() @ value[:seen, cut])
        heads.append(torch.stack(rows))
    return torch.cat(heads, dim=1) @ module.to_output.weight.T + module.to_output.bias


def norm(module, x):
    centred = x - x.mean(1, keepdim=True)
    normed = centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt()
    return normed if module.weight is None else module.weight * normed + module.bias


def feed_forward(module, x, activation="gelu"):
    hidden = x @ module.expand.weight.T + module.expand.bias
    hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2 if activation == "gelu" else hidden * (hidden > 0)
    return hidden @ module.contract.weight.T + module.contract.bias


def averaging_matrix(tokens, causal):
    """P of Eq. 21, or its lower triangular form."""
    ones = torch.ones(tokens, tokens, dtype=torch.float64)
    ones = ones.tril() if causal else ones
    return ones / ones.sum(1, keepdim=True)


def block(config, module, x):
    """Algorithm 1, with Eq. 21 in it where there is a tau; Eq. 19; or Definitions 5 and 6 of the norm-growth paper."""

    def attend(y):
        return config.alpha * attention(module.attention, y, config.causal, config.score_scale)

    def feed(y):
        return feed_forward(module.feed_forward, y, config.activation)

    def deescalate(place, y):
        if config.tau is None or config.tau_at != place:
            return y
        return y - config.tau * averaging_matrix(len(y), config.causal and not config.full_mean) @ y

    if config.norm == "pre":
        y = x + attend(norm(module.norm1, x))
        return y + feed(norm(module.norm2, y))
    if config.norm == "branch":
        y = x + config.alpha * norm(module.norm1, attention(module.attention, x, config.causal, config.score_scale))
        return y + norm(module.norm2, feed(y))
    y1 = x + attend(x)
    y2 = norm(module.norm1, deescalate("attention", y1))
    y2 = deescalate("feed_forward", y2)
    y3 = y2 + feed(y2)
    return deescalate("output", norm(module.norm2, y3))

"""The catalogue's definitions in float64 NumPy, written from the papers and not from tsemon's code.

Where no paper has the definition, because tsemon itself is the source in docs/measures.md (`attention_entropy_se`,
`output_variation`, `input_overlap`, `losses` and others), it is written from the equation there.

Each function is the shortest literal form of its equation: full Gram matrices, all eigenvalues, loops over rows, no
trick that saves time. What is undefined is NaN. X is (tokens, width), a batch is a list of such matrices without
their padding, A is (queries, keys), V is (tokens, width of the values), theta is a list of arrays.
"""

import numpy as np

NAN = float("nan")


def divided(numerator, denominator):
    """A quotient that is undefined over zero."""
    return numerator / denominator if denominator != 0 else NAN


def is_finite(x):
    return bool(np.isfinite(x).all())


def of_finite(*arrays):
    return all(is_finite(x) for x in arrays)


def mean_of_known(values):
    known = [value for value in values if not np.isnan(value)]
    return float(np.mean(known)) if known else NAN


def usable(batch):
    """Samples that are finite and not all padding."""
    return [x for x in batch if len(x) and is_finite(x)]


# One token matrix.


def projected(x):
    """Pi_1 X with Pi_1 = 11'/T: the mean token in every row."""
    return np.repeat(x.mean(axis=0, keepdims=True), len(x), axis=0)


def energy(x):
    """|X|^2 in the Frobenius norm."""
    return float((x**2).sum())


def less_mean(rows):
    """Rows less their mean row. A mean of equal floats need not equal them: of equal rows nothing is left."""
    return rows - rows.mean(axis=0) if (rows != rows[0]).any() else np.zeros_like(rows)


def token_similarity(x):
    if not of_finite(x):
        return NAN
    return divided(energy(projected(x)), energy(x))


def token_diversity(x):
    if not of_finite(x):
        return NAN
    return divided(energy(less_mean(x)), energy(x))


def cosine_similarity(x):
    norms = np.sqrt([energy(row) for row in x])
    if not of_finite(x) or len(x) < 2 or (norms == 0).any():
        return NAN
    unit = x / norms[:, None]
    gram = unit @ unit.T
    return float(gram[~np.eye(len(x), dtype=bool)].mean())


def hfc_lfc(x):
    if not of_finite(x):
        return NAN
    return divided(np.sqrt(energy(less_mean(x))), np.sqrt(energy(projected(x))))


def effective_rank(x):
    if not of_finite(x) or not x.any():
        return NAN
    sigma = np.linalg.svd(x, compute_uv=False)
    share = sigma / sigma.sum()
    return float(np.exp(-sum(p * np.log(p) for p in share if p > 0)))


def first_norm_ratio(x):
    norms = np.sqrt([energy(row) for row in x])
    return NAN if not of_finite(x) or len(x) < 2 else divided(norms[0], norms[1:].mean())


def deescalated_token_similarity(x, tau):
    if not of_finite(x):
        return NAN
    return token_similarity(less_mean(x) + (1 - tau) * x.mean(axis=0))  # (I - tau Pi_1) X


def escalation_rate(x, y):
    return divided(token_diversity(x), token_diversity(y))


def gain(x, y):
    return divided(np.sqrt(energy(y)), np.sqrt(energy(x))) if of_finite(x) and of_finite(y) else NAN


def rms(x):
    return np.sqrt(np.mean(x**2)) if of_finite(x) else NAN


# A batch of token matrices.


def centred_token_similarity(batch):
    batch = usable(batch)
    if len(batch) < 2:
        return NAN
    rows = less_mean(np.concatenate(batch))
    ends = np.cumsum([len(x) for x in batch])[:-1]
    return mean_of_known([token_similarity(x) for x in np.split(rows, ends)])


def global_diversity(batch):
    batch = usable(batch)
    if not batch:
        return NAN
    rows = np.concatenate(batch)
    return divided(energy(less_mean(rows)), energy(rows))


def batch_means(batch):
    return np.stack([x.mean(axis=0) for x in usable(batch)])


def batch_similarity(batch):
    return token_similarity(batch_means(batch)) if len(usable(batch)) > 1 else NAN


def batch_rank(batch):
    if not usable(batch):
        return NAN
    return effective_rank(less_mean(batch_means(batch)))


def hidden_rms(batch):
    batch = usable(batch)
    rows = np.concatenate(batch) if batch else None
    return NAN if rows is None else float(np.sqrt(energy(rows) / rows.size))


def hidden_max(batch):
    return max((float(np.abs(x).max()) for x in usable(batch)), default=NAN)


def nonfinite(batch):
    return float(np.mean([not is_finite(x) for x in batch]))


def dead_units(batch):
    batch = usable(batch)
    rows = np.concatenate(batch) if batch else np.zeros((0, 1))
    return NAN if len(rows) < 2 else float((rows.max(axis=0) == rows.min(axis=0)).mean())


def output_variation(logits):
    """Rows with NaN do not count."""
    rows = [np.exp(row - row.max()) / np.exp(row - row.max()).sum() for row in logits if not np.isnan(row).any()]
    return token_diversity(np.stack(rows)) if len(rows) > 1 else NAN


def input_overlap(batch, before):
    """Of sequences, each a tuple of its elements."""
    return float(np.mean([sequence in before for sequence in batch]))


def distinct_inputs(batch):
    """Of sequences, each a tuple of its elements."""
    return sum(sequence not in batch[:i] for i, sequence in enumerate(batch)) if len(batch) > 1 else NAN


# Attention.


def softmax(scores, visible):
    """Rows that see nothing are NaN."""
    found = np.full(scores.shape, NAN)
    for i, row in enumerate(scores):
        if visible[i].any():
            weights = np.where(visible[i], np.exp(row - row[visible[i]].max()), 0.0)
            found[i] = weights / weights.sum()
    return found


def row_entropy(row):
    return float(-sum(p * np.log(p) for p in row if p > 0)) if is_finite(row) else NAN


def normalized_row_entropies(scores, visible):
    """NaN for rows that see fewer than two keys."""
    a, seen = softmax(scores, visible), visible.sum(axis=1)
    return np.array([row_entropy(row) / np.log(n) if n > 1 else NAN for row, n in zip(a, seen, strict=True)])


def attention_entropy(scores, visible):
    if not is_finite(scores[visible]):
        return NAN
    return mean_of_known(normalized_row_entropies(scores, visible))


def attention_entropy_min(scores, visible):
    """Of heads (H, Q, K)."""
    return min(
        (e for e in map(attention_entropy, scores, visible) if not np.isnan(e)),
        default=NAN,
    )


def attention_entropy_se(entropies, num_samples, num_rows):
    """Of a list of samples, each its rows' entropies, for the mean over `num_rows` rows of each of `num_samples`."""
    b, n = len(entropies), sum(map(len, entropies))
    all_rows = b * num_rows
    within = sum(((rows - rows.mean()) ** 2).sum() for rows in entropies) / (n - b) if n > b else NAN
    of_rows = within / n
    of_samples = np.var([rows.mean() for rows in entropies], ddof=1) / b if b > 1 else of_rows
    squared = (1 - b / num_samples) * of_samples if b < num_samples else 0.0
    return float(np.sqrt(squared + (b / num_samples * (1 - n / all_rows) * of_rows if n < all_rows else 0.0)))


def max_attention_logit(scores, visible):
    rows = [row[seen] for row, seen in zip(scores, visible, strict=True) if seen.any()]
    return max((float(row.max()) for row in rows if not np.isnan(row).any()), default=NAN)


def importance_entropy(a):
    """In nats. Of the mean over heads, to follow the authors."""
    if not of_finite(a):
        return NAN
    received = a.mean(axis=0)
    return row_entropy(received / received.sum()) if received.sum() > 0 else NAN


def normalized_importance_entropy(a):
    return importance_entropy(a) / np.log(a.shape[1]) if a.shape[1] > 1 else NAN


def sink_share(a):
    return float(a[1:, 0].mean()) if of_finite(a) and len(a) > 1 else NAN


def positions_attended(a, threshold=1e-5):
    return float((a > threshold).sum(axis=1).mean()) if of_finite(a) else NAN


def second_eigenvalue(p):
    if not of_finite(p) or len(p) < 2:
        return NAN
    return float(np.sort(np.abs(np.linalg.eigvals(p)))[-2])


def spectral_gap(heads):
    return 1 - mean_of_known([second_eigenvalue(p) for p in heads])


# Values.


def value_top_eigenvalue(v):
    if not of_finite(v):
        return NAN
    return float(np.linalg.eigvalsh(sum(np.outer(row, row) for row in v) / len(v))[-1])


# Parameters.


def value_output_growth(value, output):
    if not (of_finite(value) and of_finite(output)):
        return NAN
    return float(np.abs(1 + np.linalg.eigvals(value.T @ output.T)).max())


def of_each_head(value, output, num_heads):
    """H of each head, width by width, from its own columns of the values and rows of the output."""
    values, outputs = np.split(value, num_heads), np.split(output, num_heads, axis=1)
    return [v.T @ o.T for v, o in zip(values, outputs, strict=True)]


def value_output_negative_share(h, head_width):
    """Of one head: its eigenvalues but for the zeros that D - K of them are."""
    if not of_finite(h) or not h.any():
        return NAN
    eigenvalues = np.linalg.eigvals(h)
    return float((eigenvalues.real < -1e-6 * np.abs(eigenvalues).max()).sum() / head_width)


def value_output_norm(h):
    return float(np.linalg.norm(h, 2)) if of_finite(h) else NAN


def flat(theta):
    return np.concatenate([np.ravel(x).astype(np.float64) for x in theta])


def norm(theta):
    return float(np.sqrt(energy(flat(theta))))


def cosine(a, b):
    if not (norm([a]) and norm([b])):
        return NAN
    return float((a / norm([a])) @ (b / norm([b])))


def update_norm(theta, theta_next):
    return norm([flat(theta_next) - flat(theta)])


def update_ratio(theta, theta_next):
    return divided(update_norm(theta, theta_next), norm(theta))


def update_alignment(theta, theta_next):
    return cosine(flat(theta_next) - flat(theta), flat(theta))


def direction_cosine(theta, theta_next):
    return cosine(flat(theta), flat(theta_next))


def gradient_alignment(gradient, theta):
    return cosine(flat(gradient), flat(theta))


def saturation(f, f_scaled):
    if not of_finite(f, f_scaled):
        return NAN
    return float(np.mean([cosine(a, b) for a, b in zip(f, f_scaled, strict=True)]))


def power_law(t, norms):
    """Exponent and r2 of |theta_t| - |theta_0| = c t^p by least squares on logarithms."""
    growth, t = norms[1:] - norms[0], t[1:] - t[0]
    grown = growth > 0
    if not of_finite(norms) or grown.sum() < 8 or 2 * grown.sum() < len(growth):
        return NAN, NAN
    x, y = np.log(t[grown]), np.log(growth[grown])
    slope, intercept = np.polyfit(x, y, 1)
    residual = ((y - slope * x - intercept) ** 2).sum()
    return float(slope), float(1 - residual / ((y - y.mean()) ** 2).sum())


# Losses.


def losses(values):
    """Mean, minimum, maximum, standard deviation and the number that is not finite."""
    finite = values[np.isfinite(values)]
    found = (
        (finite.mean(), finite.min(), finite.max(), np.sqrt(((finite - finite.mean()) ** 2).mean()))
        if len(finite)
        else (NAN,) * 4
    )
    names = ("loss_mean", "loss_min", "loss_max", "loss_std", "loss_nonfinite")
    recent, before = values[-5:], values[max(len(values) - 40, 0) : max(len(values) - 8, 0)]
    recent, before = recent[np.isfinite(recent)], before[np.isfinite(before)]
    start = values[:2048][np.isfinite(values[:2048])][:48]
    median = np.sort(start)[(len(start) - 1) // 2] if len(start) else NAN
    is_early = len(recent) == np.isfinite(values[-40:]).sum()
    return dict(zip(names, (*found, len(values) - len(finite)), strict=True)) | {
        "loss_recent": recent.mean() if len(recent) >= 3 or (len(recent) and is_early) else NAN,
        "loss_before": before.mean() if len(before) >= 16 else NAN,
        "loss_noise": np.sqrt(((before - before.mean()) ** 2).mean()) if len(before) >= 16 else NAN,
        "loss_start": max(min(start[0], 5 * abs(median)), median) if len(start) >= 24 else NAN,
    }

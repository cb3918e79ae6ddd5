"""The loss of preferences and its slope, compared with torch's own derivative."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tinkex.chat.examples import Rendered
from tinkex.loops.batches import fingerprint, weighted
from tinkex.loops.dpo import judged, margin_gradients

BETA = 0.3


def test_loss_and_slopes_are_those_of_the_formula():
    rng = np.random.default_rng(1)
    gains = torch.tensor(rng.normal(0, 20, (6, 2)), requires_grad=True)
    margins = BETA * (gains[:, 0] - gains[:, 1])
    loss = -F.logsigmoid(margins).mean()
    (gradient,) = torch.autograd.grad(loss, gains)
    known = margins.detach().numpy()
    assert judged(known)["loss"] == pytest.approx(loss.item(), rel=1e-12)
    # A cross-entropy with weight w has the slope -w by the log-probability.
    found = margin_gradients(known, BETA)
    np.testing.assert_allclose(found, -gradient[:, 0].numpy(), rtol=1e-9)
    np.testing.assert_allclose(-found, -gradient[:, 1].numpy(), rtol=1e-9)


def test_extreme_margins_stay_finite():
    margins = np.array([-1e6, 0.0, 1e6])
    assert np.isfinite(margin_gradients(margins, 1.0)).all()
    assert np.isfinite(judged(margins)["loss"])


def test_a_tie_is_not_a_pair_won():
    assert judged(np.zeros(4))["accuracy"] == 0.0


def test_only_trained_tokens_get_the_slope():
    rendered = Rendered((1, 2, 3, 4), (0.0, 0.0, 1.0, 1.0))
    datum = weighted(rendered, -0.25)
    assert datum.loss_fn_inputs["weights"].to_numpy().tolist() == [0.0, -0.25, -0.25]
    assert datum.loss_fn_inputs["target_tokens"].to_numpy().tolist() == [2, 3, 4]


def test_what_is_trained_on_has_a_name_that_changes_with_it():
    one = Rendered((1, 2, 3), (0.0, 1.0, 1.0))
    other = Rendered((1, 2, 3), (0.0, 0.0, 1.0))
    names = [
        fingerprint(parts)
        for parts in (([one], []), ([], [one]), ([other], []), ([one, one], []), ([one], [one]))
    ]
    assert len(set(names)) == 5
    assert fingerprint(([one], [])) == names[0]

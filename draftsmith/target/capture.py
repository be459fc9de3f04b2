"""`Capture`: samples to features, by running the target over each sample alone.

One sample a pass, at its exact length: no padding is computed, and what is captured never depends on what it was batched with, so
features from disk and features made while training are the same bits. The price on a CPU in float32: about 490 tokens/s of forward pass
alone at 200 tokens, where batches of eight reach 830.
"""

from __future__ import annotations

import torch

from draftsmith.core.types import IGNORED, Features, FeatureSpec, Sample
from draftsmith.target.model import TargetModel
from draftsmith.target.weights import Target

_ROWS = 512
"""Rows of logits that exist at a time while the target's arg-max is taken."""


class Capture:
    """Makes features under one specification."""

    def __init__(self, model: TargetModel, target: Target, spec: FeatureSpec) -> None:
        if spec.layers[-1] >= target.shape.layers:
            raise ValueError(f"capture layer {spec.layers[-1]} does not exist: the target has blocks 0 to {target.shape.layers - 1}")
        self.model, self.target, self.spec = model, target, spec
        self._dtype = getattr(torch, spec.dtype)

    @torch.inference_mode()
    def __call__(self, sample: Sample) -> Features:
        """Capture one sample."""
        states = self.model.run(sample.input_ids[None].to(self.model.device), self.spec.layers)
        assert states.hidden_BQF is not None
        last_TH = states.last_BQH[0]
        return Features(
            sample=sample,
            hidden_TF=states.hidden_BQF[0].to(self._dtype).cpu(),
            last_TH=last_TH.to(self._dtype).cpu(),
            argmax_T=self._argmax(last_TH, sample),
        )

    def _argmax(self, last_TH: torch.Tensor, sample: Sample) -> torch.Tensor:
        """The target's most likely token after position t, where t + 1 is the assistant's."""
        argmax_T = torch.full((len(sample),), IGNORED, dtype=torch.int32)
        wanted = sample.loss_mask[1:].nonzero()[:, 0]
        for rows in wanted.split(_ROWS):
            argmax_T[rows] = self.target.logits(last_TH[rows]).argmax(dim=-1).to("cpu", torch.int32)
        return argmax_T

    @torch.inference_mode()
    def check(self, sample: Sample) -> None:
        """Prove that `Target.logits` of the captured state equals the model's own logits, and sees no later token, before the expensive work.

        Raises ValueError when they differ: the target's family has a logit rule that Draftsmith does not know, or it is no causal language model.
        """
        ids = sample.input_ids[None, :64].to(self.model.device)
        self.model.require_causal(ids)
        own = self.model.own_logits(ids)[0].float().clamp(min=-1e6)
        ours = self.target.logits(self.model.run(ids).last_BQH[0]).float()[:, : own.shape[-1]].clamp(min=-1e6)
        error = float((own - ours).abs().max() / own.abs().max().clamp(min=1e-6))
        if not error <= 0.02:
            raise ValueError(
                f"the target's own logits and head @ last differ by {error:.1%} of their largest: {self.target.shape.model_type} has a logit rule that is "
                "not supported yet; training on it would teach a wrong distribution"
            )

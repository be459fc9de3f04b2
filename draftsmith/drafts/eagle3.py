"""EAGLE-3: one decoder block over (embedding of the next token, features of the target), trained by training-time test.

Li et al., arXiv 2503.01840. Which token, feature, position and teacher meet is stated in docs/design/alignment.md; tests/drafts/test_eagle3.py
holds a reference that loops over single positions. What is computed here is only what a supervised prediction needs: step-0 keys
and values of all tokens, and chains that have a supervised prediction, or a random subset of them per document with weights that
keep the loss unbiased.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor, nn

from draftsmith.core.config import Config, Positive, Schedule, Size, at
from draftsmith.core.types import FeatureBatch, FeatureSpec, Progress, Proposal, Ratio, StepOutput, TargetShape
from draftsmith.drafts import published
from draftsmith.drafts.base import Context, Draft, Form, Layout, Sampling, Service, draw
from draftsmith.nn.attention import KeyValues, attend
from draftsmith.nn.blocks import MLP, Projections, RMSNorm
from draftsmith.nn.chain_attention import blocks, chain_attention
from draftsmith.nn.chains import Chains, visited
from draftsmith.nn.linear import one_weight_gradient
from draftsmith.nn.losses import linear_kl
from draftsmith.nn.rope import Rope
from draftsmith.nn.start import low_rank, own_place, ridge
from draftsmith.target.weights import Target

RIDGE = 1e-2
"""Regularisation of the regression start, relative to the mean square of a feature."""


class Eagle3Config(Config):
    """An EAGLE-3 draft."""

    kind: Literal["eagle3"] = "eagle3"
    """The algorithm."""
    layers: tuple[int, ...] | None = None
    """Decoder blocks whose outputs are captured, 0-based. Default: 1, n//2-1 and n-4 of n, which every engine takes to be the same."""
    vocab_size: Positive = 8192
    """Size of the draft vocabulary; the target's most frequent answer tokens are chosen."""
    steps: Schedule = ((0.0, 7),)
    """Steps of training-time test (K): how many tokens each chain drafts in training. A number, or [[0, 1], [0.5, 3]] to grow over training."""
    chains: Schedule | None = None
    """Chains per document drawn at random each step; all when absent. Losses keep their meaning: the draw is unbiased."""
    step_weight: Annotated[float, Field(gt=0, le=1, strict=True)] = 1.0
    """Step k counts step_weight ** k in the loss."""
    start: Literal["regression", "random"] = "regression"
    """regression: the draft starts as the best linear map from features and next token to the target's next final state, solved in closed form on
    some features. random: as any layers."""
    train_head: bool = True
    """Train the head too. Frozen, it stays the target's own rows: its share of the work falls by a third."""
    feature_noise: Size = 0.0
    """Uniform noise up to this many root mean squares, added to features in training (EAGLE, arXiv 2401.15077): works against overfitting."""
    norm_before_residual: bool = False
    """The block adds to its normed input instead of the raw one, as drafts of the speculators library do. vLLM and llama.cpp serve both."""
    intermediate_size: Positive | None = None
    """Width of the MLP; the target's when absent."""
    init_from: str | None = None
    """Directory of a published draft to start from instead (docs/export.md); its sizes, layers and vocabulary replace those above."""


class Eagle3(Draft):
    """The draft model; tensor names are those of published checkpoints."""

    forms = ("engine", "speculators")
    config_class = Eagle3Config
    d2t: Tensor
    t2d: Tensor
    feature_scale: Tensor

    def __init__(self, config: Eagle3Config, shape: TargetShape) -> None:
        """Raises ValueError for a draft vocabulary larger than the target's."""
        super().__init__(config, replace(shape, intermediate_size=config.intermediate_size or shape.intermediate_size))
        if config.vocab_size > shape.vocab_size:
            raise ValueError(f"draft.vocab_size {config.vocab_size:,} is larger than the target's vocabulary of {shape.vocab_size:,}")
        self.layers = self.needs(config, shape).layers
        hidden, eps = shape.hidden_size, shape.norm_eps
        self.fc = nn.Linear(len(self.layers) * hidden, hidden, bias=False)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.self_attn = Projections(2 * hidden, hidden, shape.heads, shape.kv_heads, shape.head_dim)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = MLP(hidden, self.shape.intermediate_size)
        self.norm = RMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, config.vocab_size, bias=False).requires_grad_(config.train_head)
        self.rope = Rope(shape.rope, shape.head_dim, shape.max_positions)
        self.register_buffer("d2t", torch.zeros(config.vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.arange(shape.vocab_size) < config.vocab_size)
        self.register_buffer("feature_scale", torch.ones(len(self.layers)))
        self.register_load_state_dict_post_hook(lambda draft, _: setattr(draft, "_ids", None))

    @staticmethod
    def needs(config: Eagle3Config, shape: TargetShape) -> FeatureSpec:
        n = shape.layers
        if config.layers is None and n < 7:
            raise ValueError(f"the target has only {n} blocks, too few for the default capture layers: set draft.layers")
        layers = (1, n // 2 - 1, n - 4) if config.layers is None else config.layers
        if not layers or layers[-1] >= n or layers[0] < 0 or list(layers) != sorted(set(layers)):
            raise ValueError(f"draft.layers {list(layers)}: expected ascending, different ids from 0 to {n - 1} (the target has {n} blocks)")
        return FeatureSpec(layers)

    @torch.no_grad()
    def initialise(self, target: Target, counts_V: Int[Tensor, " V"], batch: FeatureBatch) -> Mapping[str, object]:
        """Choose the draft vocabulary, start head and final norm from the target's rows, and set one constant per captured layer.

        The constant divides a layer's features so that their root mean square is near 1 (attention sinks at position 0 left out). It is a
        power of two: folding it into `fc` at export changes no bit.
        """
        chosen = torch.sort(counts_V, descending=True, stable=True).indices[: self.config.vocab_size].sort().values
        self.d2t.copy_(chosen - torch.arange(len(chosen)))
        self.t2d.zero_()[chosen] = True
        # What a target multiplies with after its norm, before the head or behind it, is in this head's rows: the draft's norm is followed by them alone.
        self.lm_head.weight.copy_(target.rows(None, torch.float32)[chosen] * (target.rule.scale * (target.rule.pre or 1.0)))
        self.norm.weight.copy_(target.norm_H.float())
        layers_NLH = batch.hidden_NF[batch.position_N > 0].float().unflatten(-1, (len(self.layers), -1))
        rms_L = layers_NLH.square().mean((0, 2)).sqrt()
        self.feature_scale.copy_(torch.exp2(rms_L.log2().round()))
        if self.config.start == "regression":
            self._regress(target, batch)
        covered = float(counts_V[chosen].sum() / counts_V.sum().clamp(min=1))
        return {"draft vocabulary": f"{len(chosen):,} ids cover {covered:.2%} of the answer tokens", "feature RMS": [round(x, 2) for x in rms_L.tolist()]}

    def _regress(self, target: Target, batch: FeatureBatch) -> None:
        """Start as the best linear map from (features, embedding of the next token) to the next token's final state before the norm's weight.

        The features' part goes into `fc`. The embedding reaches the residual only through attention, so its part becomes the values and the
        output of one head per key-value head, and these heads start on their own place; all else adds nothing yet.
        """
        shape, heads = self.shape, self.self_attn
        same_N = batch.document_N[1:] == batch.document_N[:-1]
        every_M = same_N.nonzero()[:, 0]
        wanted = batch.loss_mask_N[every_M + 1]
        scale_F = self.feature_scale.repeat_interleave(shape.hidden_size)
        x_MF = batch.hidden_NF[every_M].float() / scale_F
        embedded_MH = self.input_layernorm(target.embed(batch.input_ids_N[every_M + 1]).float())
        y_MH = batch.last_NH[every_M[wanted] + 1].float() / target.norm_H.float()
        map_IH = ridge(torch.cat((x_MF, embedded_MH), dim=1)[wanted], y_MH, RIDGE)
        self.fc.weight.copy_(map_IH[: len(scale_F)].T)
        rank = shape.kv_heads * shape.head_dim
        values_HR, output_RH = low_rank(map_IH[len(scale_F) :], embedded_MH[wanted], min(rank, shape.hidden_size))
        heads.v_proj.weight.zero_()[: values_HR.shape[1], : shape.hidden_size] = values_HR.T
        mixed_MI = torch.cat((embedded_MH, self.hidden_norm(self.fc(x_MF))), dim=1)
        place_dI = own_place(mixed_MI, shape.head_dim, RIDGE)
        heads.k_proj.weight.copy_(place_dI.repeat(shape.kv_heads, 1))
        heads.o_proj.weight.zero_()
        group, dim = shape.heads // shape.kv_heads, shape.head_dim
        for kv in range(shape.kv_heads):
            first, rows = kv * group * dim, output_RH[kv * dim : (kv + 1) * dim]
            heads.q_proj.weight[first : first + dim] = place_dI
            heads.o_proj.weight[:, first : first + len(rows)] = rows.T
        self.mlp.down_proj.weight.zero_()

    # ---- training ----

    def forward(self, batch: FeatureBatch, target: Target, progress: Progress) -> StepOutput:
        steps = self.config.steps[-1][1] if progress.exact else at(self.config.steps, progress.fraction)
        chains = self._chains(batch, progress)
        if not len(chains):
            nothing = Ratio(0.0 * self.fc.weight.sum(), torch.zeros(()))
            return StepOutput(nothing, {})
        with one_weight_gradient(self):
            states_MH, chain_M, step_M = self._unroll(batch, target, chains, steps, self._noise(batch, progress))
        return self._judge(batch, target, chains, states_MH, chain_M, step_M, steps, walk=progress.exact)

    def _chains(self, batch: FeatureBatch, progress: Progress) -> Chains:
        """All chains, or a draw of them."""
        chains = Chains.of(batch.loss_mask_N, batch.document_N)
        if self.config.chains is None or progress.exact or not len(chains):
            return chains
        return chains.draw(batch.document_N, at(self.config.chains, progress.fraction), progress.seed)

    def _noise(self, batch: FeatureBatch, progress: Progress) -> Tensor | None:
        """Uniform noise on the features, in units of each layer's scale."""
        if self.config.feature_noise == 0 or progress.exact:
            return None
        uniform = torch.rand(batch.hidden_NF.shape, generator=torch.Generator().manual_seed(progress.seed)).to(batch.hidden_NF.device)
        scale_F = self.feature_scale.repeat_interleave(self.shape.hidden_size)
        return (2 * uniform - 1) * (self.config.feature_noise * scale_F)

    def _unroll(self, batch: FeatureBatch, target: Target, chains: Chains, steps: int, noise: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Recurrent states of every alive (chain, step), with their chain and step numbers."""
        following_N = batch.input_ids_N.roll(-1)
        fused_NH = self.fuse(batch.hidden_NF if noise is None else batch.hidden_NF + noise)
        mixed_NI = self._mix(target.embed(following_N), fused_NH)
        key_Nkd, value_Nkd = self.rope(self.self_attn.key(mixed_NI), batch.position_N), self.self_attn.value(mixed_NI)
        state_CH, mixed_CI = fused_NH[chains.anchor_C], mixed_NI[chains.anchor_C]
        own_key_Cskd, own_value_Cskd = (x.new_zeros(len(state_CH), 0, *x.shape[1:]) for x in (key_Nkd, value_Nkd))
        number_C = torch.arange(len(state_CH), device=state_CH.device)
        states, numbers = [], []
        for k in range(steps):
            if k:
                keep = (chains.alive_C > k).nonzero()[:, 0]
                if not len(keep):
                    break
                chains, state_CH, number_C = chains.keep(keep), state_CH[keep], number_C[keep]
                mixed_CI = self._mix(target.embed(batch.input_ids_N[chains.anchor_C + 1 + k]), state_CH)
                key = self.rope(self.self_attn.key(mixed_CI), batch.position_N[chains.anchor_C] + k)
                own_key_Cskd = torch.cat((own_key_Cskd[keep], key[:, None]), dim=1)
                own_value_Cskd = torch.cat((own_value_Cskd[keep], self.self_attn.value(mixed_CI)[:, None]), dim=1)
            place_C = batch.position_N[chains.anchor_C]
            query_Chd = self.rope(self.self_attn.query(mixed_CI), place_C + k)
            layout = blocks(batch.lengths, batch.document_N[chains.anchor_C], place_C)
            seen_Chd = chain_attention(query_Chd, key_Nkd, value_Nkd, own_key_Cskd, own_value_Cskd, layout)
            state_CH = self._finish(state_CH, seen_Chd)
            states.append(state_CH)
            numbers.append(number_C)
        step_M = torch.cat([torch.full_like(n, k) for k, n in enumerate(numbers)])
        return torch.cat(states), torch.cat(numbers), step_M

    def _judge(
        self, batch: FeatureBatch, target: Target, chains: Chains, states_MH: Tensor, chain_M: Tensor, step_M: Tensor, steps: int, walk: bool
    ) -> StepOutput:
        """Loss and acceptance of all predictions. Where the target's choice lies outside the draft vocabulary there is no
        loss, and serving would reject: it counts as not accepted."""
        ids_D = self._target_ids()
        teacher_M = chains.anchor_C[chain_M] + 1 + step_M
        label_M = batch.argmax_N[teacher_M]
        known = self.t2d[label_M].nonzero()[:, 0]
        weight_M = chains.weight_C[chain_M] * self.config.step_weight**step_M
        dtype = states_MH.dtype
        judged = linear_kl(
            self.norm(states_MH[known]),
            self.lm_head.weight,
            lambda rows: target.logits(batch.last_NH[rows].to(dtype), ids_D),
            teacher_M[known],
            weight_M[known],
        )
        right_CK = torch.zeros(len(chains.anchor_C), steps, dtype=torch.bool, device=label_M.device)
        right_CK[chain_M[known], step_M[known]] = ids_D[judged.argmax_M] == label_M[known]
        accepted_CK = right_CK.cumprod(dim=1)
        count_C = chains.weight_C
        if walk:
            count_C = count_C * visited(chains.anchor_C, accepted_CK.sum(1))
        alive_CK = chains.alive_C[:, None] > torch.arange(steps, device=label_M.device)
        weight_CK = chains.weight_C[:, None] * alive_CK
        accepted = (accepted_CK * count_C[:, None]).sum(0)
        metrics = {
            "acceptance_length": Ratio(count_C.sum() + accepted.sum(), count_C.sum()),
            "position_rates": Ratio(accepted, count_C.sum().expand(steps)),
            "step_accuracy": Ratio((right_CK * weight_CK).sum(0), weight_CK.sum(0)),
            "overlap": Ratio((judged.overlap_M * weight_M[known]).sum(), weight_M.sum()),
        }
        return StepOutput(Ratio(judged.loss, weight_M[known].sum()), {name: ratio.detach() for name, ratio in metrics.items()})

    # ---- the block ----

    def fuse(self, hidden: Float[Tensor, "*n F"]) -> Float[Tensor, "*n H"]:
        """Captured features to the first recurrent state."""
        scale_F = self.feature_scale.repeat_interleave(self.shape.hidden_size).to(hidden.dtype)
        return self.fc((hidden / scale_F).to(self.fc.weight.dtype))

    def _mix(self, embedded: Tensor, state: Tensor) -> Tensor:
        return torch.cat((self.input_layernorm(embedded.to(state.dtype)), self.hidden_norm(state)), dim=-1)

    def _finish(self, state: Tensor, seen: Tensor) -> Tensor:
        residual = self.hidden_norm(state) if self.config.norm_before_residual else state
        state = residual + self.self_attn.output(seen)
        return state + self.mlp(self.post_attention_layernorm(state))

    def _target_ids(self) -> Tensor:
        """Target ids of the draft vocabulary; one tensor object, so that the target keeps its selected rows."""
        if self._ids is None or self._ids[0] != self.d2t._version or self._ids[1].device != self.d2t.device:
            self._ids = (self.d2t._version, self.d2t + torch.arange(len(self.d2t), device=self.d2t.device))
        return self._ids[1]

    _ids: tuple[int, Tensor] | None = None

    # ---- drafting ----

    def start(self, rows: int) -> KeyValues:
        shape = (rows, 0, self.shape.kv_heads, self.shape.head_dim)
        weight = self.fc.weight
        return KeyValues(weight.new_empty(shape), weight.new_empty(shape), torch.empty(rows, 0, dtype=torch.bool, device=weight.device))

    @torch.inference_mode()
    def propose(self, context: Context, state: KeyValues, target: Target, width: int, sampling: Sampling) -> Proposal:
        rows = torch.arange(len(context.next_BR), device=context.next_BR.device)
        place_BR = torch.arange(context.valid_BR.shape[1], device=rows.device) * context.valid_BR
        last_B = place_BR.max(1).values
        fused_BRH = self.fuse(context.hidden_BRF)
        mixed_BRI = self._mix(target.embed(context.next_BR), fused_BRH)
        state.append(self.rope(self.self_attn.key(mixed_BRI), context.position_BR), self.self_attn.value(mixed_BRI), context.valid_BR)
        kept = len(state)
        state_B1H, mixed_B1I = fused_BRH[rows, last_B][:, None], mixed_BRI[rows, last_B][:, None]
        position_B1 = context.position_BR[rows, last_B][:, None]
        tokens, probs = [], []
        for k in range(width):
            if k:
                mixed_B1I = self._mix(target.embed(tokens[-1]), state_B1H)
                key = self.rope(self.self_attn.key(mixed_B1I), position_B1 + k)
                state.append(key, self.self_attn.value(mixed_B1I), torch.ones_like(position_B1, dtype=torch.bool))
            query_B1hd = self.rope(self.self_attn.query(mixed_B1I), position_B1 + k)
            seen_B1hd = attend(query_B1hd, state.key_BTkd, state.value_BTkd, state.valid_BT[:, None])
            state_B1H = self._finish(state_B1H, seen_B1hd)
            token_B1, probs_B1D = draw(self.lm_head(self.norm(state_B1H)), sampling)
            tokens.append(self._target_ids()[token_B1])
            if probs_B1D is not None:
                probs.append(probs_B1D.new_zeros(len(rows), 1, self.shape.vocab_size).index_copy_(2, self._target_ids(), probs_B1D))
        state.crop(kept)
        state.trim()
        return Proposal(torch.cat(tokens, dim=1), torch.cat(probs, dim=1) if probs else None)

    # ---- shipping ----

    @staticmethod
    def recognises(fields: Mapping[str, Any]) -> bool:
        """Engines tell EAGLE-3 from a Llama by `draft_vocab_size`."""
        name = (fields.get("architectures") or [""])[0]
        return name in ARCHITECTURES or (name == "LlamaForCausalLM" and "draft_vocab_size" in fields)

    @staticmethod
    def engines(config: Eagle3Config, shape: TargetShape) -> Mapping[str, Service]:
        """The rules and where each was read: docs/export.md."""
        layers = list(Eagle3.needs(config, shape).layers)
        one = len(layers) == 1
        no_fc = f"draft.layers {layers}: with one captured block {{}} leaves out fc; capture at least two"
        rope = shape.rope.get("rope_type", "default")
        llama_cpp = [f"draft.layers {layers}: llama.cpp reads exactly three; capture three"] if len(layers) != 3 else []
        if rope not in ("default", "linear", "yarn", "llama3"):
            llama_cpp.append(f"rotary positions of type {rope}: llama.cpp's converter writes default, linear, yarn, llama3; choose another engine")
        return {
            "sglang": Service("EAGLE3", (no_fc.format("SGLang"),) if one else (), reads=published.SGLANG_READS),
            "vllm": Service("eagle3", reads=published.VLLM_READS),
            "llama.cpp": Service("draft-eagle3", tuple(llama_cpp)),
            "tensorrt-llm": Service("Eagle3", (no_fc.format("TensorRT-LLM"),) if one else (), f"eagle3_layers_to_capture: {layers}"),
        }

    def layout(self, form: Form = "engine") -> Layout:
        """`midlayer.` names and layer ids in both conventions (nested: outputs; top level: inputs), or as speculators has it. A full vocabulary ships
        without its tables: vLLM has no place for them then."""
        left_out = ("feature_scale", *(("d2t", "t2d") if self.config.vocab_size == self.shape.vocab_size else ()))
        prefix = "midlayer." if form == "engine" else "layers.0."
        names = {k: published.in_block(k, prefix) for k in self.state_dict() if k not in left_out}
        config: dict[str, Any] = {
            "draft_vocab_size": self.config.vocab_size, "target_hidden_size": self.shape.hidden_size, "norm_before_residual": False,
            "eagle_aux_hidden_state_layer_ids": [i + 1 for i in self.layers],
        }  # fmt: skip
        if form == "speculators":
            flags = {"norm_before_fc": False, "fc_norm": False, "norm_output": False}
            return Layout(names, {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"} | config | flags)
        nested = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(self.layers)}
        more = {"num_hidden_layers": 1, "num_aux_hidden_states": len(self.layers), "eagle_config": nested}
        return Layout(names, {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"} | config | more)

    published_layers = staticmethod(published.captured)
    layer_faults = staticmethod(published.layer_faults)
    published_name = staticmethod(published.without_block)

    @classmethod
    def from_engine(cls, fields: Mapping[str, Any], shape: TargetShape, config: Eagle3Config, layers: tuple[int, ...]) -> Eagle3:
        published.refuse_variants(fields, shape)
        size = fields.get("draft_vocab_size") or shape.vocab_size
        return cls(config.model_copy(update={"layers": layers, "vocab_size": size, "intermediate_size": shape.intermediate_size}), shape)

    def plain_state(self) -> dict[str, Tensor]:
        state = {k: v for k, v in self.state_dict().items() if k != "feature_scale"}
        state["fc.weight"] = state["fc.weight"] / self.feature_scale.repeat_interleave(self.shape.hidden_size)
        return state

    def load_plain_state(self, tensors: Mapping[str, Tensor]) -> None:
        self.load_state_dict(dict(tensors) | {"feature_scale": torch.ones_like(self.feature_scale)})


ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "EAGLE3LlamaForCausalLM", "Eagle3DraftModel", "Eagle3Speculator")
"""Names that published EAGLE-3 drafts of one Llama block go by."""

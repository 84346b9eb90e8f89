"""Short distillation of converted attention, to see how much of the *conversion damage* some minutes buy back.

It is not uptraining: Ainslie et al. 2023 spend 5 % of the pre-training on that. Nothing here says how good a model with
so few KV heads can be. Attention is written with torch's own functions, since variants and caches have no gradients.
Legend: N = token of a batch of windows, B = window, T = token in a window, H = hidden_size, Q = query head,
K = kv head, D = head_dim, V = vocab_size.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import kl_div, linear, rms_norm, silu
from tqdm.auto import tqdm

from kvlab.kernels.folded_sdpa import folded_sdpa, visible_rule
from kvlab.model import rope

if TYPE_CHECKING:
    from torch import Tensor

    from kvlab.model.config import DecoderConfig
    from kvlab.model.decoder import Decoder


def distil(student: Decoder, teacher: Decoder, ids: Tensor, steps: int = 20, *, kd_steps: int = 0, window: int = 256,
           batch: int = 2, learning_rate: float = 4e-3, kd_learning_rate: float = 6e-4, seed: int = 0,
           progress: bool = False, told: Callable[[str], None] = lambda stage: None) -> Decoder:
    """The student with attention projections trained on the teacher, layer by layer, then (kd_steps) all at once.

    Layer by layer: each layer gets the teacher's inputs and learns the output of its attention, `steps` of Adam on the
    squared error relative to that output. kd_steps: on the KL of the student's next-token distributions to the
    teacher's, through the whole model. ids: token ids of a text that is not evaluated, cut into windows; a step takes
    `batch` of them. The rates fall linearly to 0. Computed in fp32. told: hears of every step.
    Raises ValueError where a loss is not finite.
    On SmolLM2-135M, 3 to 1 KV heads, 20 steps on 1,536 tokens leave a KL of 2.2 nat of the mean's 6.2, and 1.3 of the
    aligned mean's 3.6, with this rate, the best of five that were tried (6e-4: 3.5 and 1.7).
    Source: Hinton et al. 2015, arXiv 1503.02531, for the distributions.
    """
    if replace(student.config, num_kv_heads=teacher.config.num_kv_heads) != teacher.config:
        raise ValueError("student and teacher may differ only in num_kv_heads: distil a conversion from the decoder it "
                         "was made of")
    if min(steps, kd_steps) < 0 or min(window, batch) < 1 or not min(learning_rate, kd_learning_rate) > 0:
        raise ValueError(f"steps={steps} and kd_steps={kd_steps} must be at least 0, window={window} and batch={batch} "
                         f"at least 1, learning_rate={learning_rate} and kd_learning_rate={kd_learning_rate} above 0")
    ids_BT = _windows(teacher, ids, window, batch)
    learned = dict(student.weights)
    if steps:
        learned |= _layer_by_layer(learned, teacher, ids_BT, steps, batch, learning_rate, seed, progress, told)
    if kd_steps:
        learned |= _end_to_end(learned, teacher, ids_BT, kd_steps, batch, kd_learning_rate, seed, progress, told)
    changed = {name: w.to(student.dtype) for name, w in learned.items() if w is not student.weights[name]}
    told = [f"distilled {n} steps {how}" for n, how in ((steps, "a layer"), (kd_steps, "end to end")) if n]
    return student.renamed(", ".join([student.name, *told]), changed)


def _windows(teacher: Decoder, ids: Tensor, window: int, batch: int) -> Tensor:
    """The text as [B, T] windows; what is left over is not used."""
    ids = torch.as_tensor(ids, device=teacher.device)
    if len(ids) < batch * window:
        raise ValueError(f"ids holds {len(ids)} tokens, and a step takes {batch} windows of {window}; give at least "
                         f"{batch * window}, or smaller windows")
    if window > teacher.config.context:
        raise ValueError(f"window={window} is beyond the model's context of {teacher.config.context}")
    return ids[:len(ids) // window * window].view(-1, window)


def _layer_by_layer(weights: Mapping[str, Tensor], teacher: Decoder, ids_BT: Tensor, steps: int, batch: int,
                    rate: float, seed: int, progress: bool, told) -> dict[str, Tensor]:
    """What each layer's attention learns from the teacher's inputs and outputs."""
    config, (B, T) = teacher.config, ids_BT.shape
    cos_sin, learned = rope.tables(config, T, teacher.device), {}
    x_NH = teacher.weights["model.embed_tokens.weight"][ids_BT.flatten()].float()
    for layer in tqdm(range(config.num_layers), desc="distilling", unit="layer", disable=not progress):
        fixed = _floats(teacher.weights, f"model.layers.{layer}.")
        with torch.no_grad():
            h_NH = _norm(x_NH, fixed, f"model.layers.{layer}.input_layernorm", config)
            goal_NH = _attention(config, layer, fixed, h_NH, B, cos_sin)
        trained = _parameters(weights, [layer])

        def loss(chosen, layer=layer, fixed=fixed, trained=trained, h_NH=h_NH, goal_NH=goal_NH):
            h, goal = (x.view(B, T, -1)[chosen].flatten(0, 1) for x in (h_NH, goal_NH))
            out = _attention(config, layer, {**fixed, **trained}, h, len(chosen), cos_sin)
            return (out - goal).square().sum() / goal.square().sum()
        _train(trained, loss, _batches(B, batch, steps, seed), steps, rate, f"layer {layer}", told)
        learned |= {name: p.detach() for name, p in trained.items()}
        with torch.no_grad():
            x_NH = _mlp(config, layer, fixed, x_NH + goal_NH)
    return learned


def _end_to_end(weights: Mapping[str, Tensor], teacher: Decoder, ids_BT: Tensor, steps: int, batch: int, rate: float,
                seed: int, progress: bool, told) -> dict[str, Tensor]:
    """What the attention of all layers learns from the teacher's next-token distributions."""
    config = teacher.config
    fixed, cos_sin = _floats(teacher.weights), rope.tables(config, ids_BT.shape[1], teacher.device)
    trained = _parameters(weights, range(config.num_layers))

    def loss(chosen):
        with torch.no_grad():
            goal_NV = _log_probabilities(config, fixed, ids_BT[chosen], cos_sin)
        found_NV = _log_probabilities(config, {**fixed, **trained}, ids_BT[chosen], cos_sin)
        return kl_div(found_NV, goal_NV, reduction="batchmean", log_target=True)
    batches = tqdm(_batches(len(ids_BT), batch, steps, seed), total=steps, desc="distilling", disable=not progress)
    _train(trained, loss, batches, steps, rate, "end to end", told)
    return {name: p.detach() for name, p in trained.items()}


def _train(trained: dict[str, Tensor], loss, batches, steps: int, rate: float, where: str, told) -> None:
    """Adam in place, its rate falling linearly to 0; stops at a loss that is not finite."""
    adam = torch.optim.Adam(trained.values(), lr=rate)
    for step, chosen in enumerate(batches):
        told(f"distilling {where}, step {step}")
        adam.param_groups[0]["lr"] = rate * (1 - step / steps)
        adam.zero_grad()
        with torch.enable_grad():
            found = loss(chosen)
            if not bool(found.isfinite()):
                raise ValueError(f"{where}, step {step}: the distillation loss is {found.item()}; take a lower "
                                 f"learning rate than {rate:g}, or look for NaN in the weights")
            found.backward()
        adam.step()


def _batches(windows: int, batch: int, steps: int, seed: int) -> Iterator[list[int]]:
    """Which windows each step takes: all in random order before one comes again."""
    generator, waiting = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        while len(waiting) < batch:
            waiting += torch.randperm(windows, generator=generator).tolist()
        yield waiting[:batch]
        waiting = waiting[batch:]


def _parameters(weights: Mapping[str, Tensor], layers) -> dict[str, Tensor]:
    """Copies in fp32 of the q, k, v and o projections of those layers, with gradients."""
    names = [f"model.layers.{layer}.self_attn.{side}_proj.{kind}" for layer in layers for side in "qkvo"
             for kind in ("weight", "bias")]
    return {name: weights[name].detach().float().clone().requires_grad_() for name in names if name in weights}


def _floats(weights: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    return {name: w.float() for name, w in weights.items() if name.startswith(prefix)}


def _log_probabilities(config: DecoderConfig, w: Mapping[str, Tensor], ids_BT: Tensor, cos_sin) -> Tensor:
    """[N, V] over the whole vocabulary, differentiable in the attention's projections."""
    x_NH = w["model.embed_tokens.weight"][ids_BT.flatten()]
    for layer in range(config.num_layers):
        h_NH = _norm(x_NH, w, f"model.layers.{layer}.input_layernorm", config)
        x_NH = _mlp(config, layer, w, x_NH + _attention(config, layer, w, h_NH, len(ids_BT), cos_sin))
    head = "model.embed_tokens.weight" if config.tied else "lm_head.weight"
    return linear(_norm(x_NH, w, "model.norm", config), w[head]).log_softmax(-1)


def _attention(config: DecoderConfig, layer: int, w: Mapping[str, Tensor], h_NH: Tensor, sequences: int,
               cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """The attention block's output [N, H] for normed inputs of so many windows; KV heads as many as k_proj has."""
    at = f"model.layers.{layer}.self_attn"
    q, k, v = (_linear(h_NH, w, f"{at}.{side}_proj").unflatten(1, (-1, config.head_dim)) for side in "qkv")
    if config.qk_norm:
        q, k = _norm(q, w, f"{at}.q_norm", config), _norm(k, w, f"{at}.k_norm", config)
    turns = [table.repeat(sequences, 1) for table in cos_sin]
    q_BTQD, k_BTKD, v_BTKD = (x.unflatten(0, (sequences, -1))
                              for x in (rope.rotate(q, *turns), rope.rotate(k, *turns), v))
    T = q_BTQD.shape[1]
    rule = visible_rule(T, T, config.windows[layer], h_NH.device)
    out_BTQD = folded_sdpa(q_BTQD, k_BTKD.transpose(1, 2), v_BTKD.transpose(1, 2), rule)
    return _linear(out_BTQD.flatten(0, 1).flatten(1), w, f"{at}.o_proj")


def _mlp(config: DecoderConfig, layer: int, w: Mapping[str, Tensor], x_NH: Tensor) -> Tensor:
    """The gated MLP behind its norm, with the residual."""
    at = f"model.layers.{layer}"
    h_NH = _norm(x_NH, w, f"{at}.post_attention_layernorm", config)
    gated = silu(_linear(h_NH, w, f"{at}.mlp.gate_proj")) * _linear(h_NH, w, f"{at}.mlp.up_proj")
    return x_NH + _linear(gated, w, f"{at}.mlp.down_proj")


def _norm(x: Tensor, w: Mapping[str, Tensor], name: str, config: DecoderConfig) -> Tensor:
    weight = w[f"{name}.weight"]
    return rms_norm(x, weight.shape, weight, config.rms_eps)


def _linear(x: Tensor, w: Mapping[str, Tensor], name: str) -> Tensor:
    return linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

"""What telemetry must say, from the definitions, in plain float64 torch. Imports no Megatron.

Works on the parameters of one whole model by name, before and after a step, and on their gradients; nothing
is sharded, summed over ranks, or kept from one call to the next.
"""

from __future__ import annotations

import math
import re
from itertools import combinations

import torch
from reference import product, unit

__all__ = ["expected_telemetry", "stepped"]

_LAYER = r"decoder\.layers\.(\d+)\."
_NORMS = {
    r"self_attention\.([qkv])_layernorm": ("attention", None, "out"),
    r"input_layernorm": ("attention", "shared", "in"),
    r"pre_mlp_layernorm": ("mlp", "shared", "in"),
}


def stepped(leaves, rate, most):
    """Gradients clipped to a norm of ``most``, the norm before, and parameters after a step of descent."""
    norm = math.sqrt(sum(float(leaf.grad.square().sum()) for leaf in leaves.values()))
    factor = min(1.0, most / (norm + 1e-6))
    gradients = {name: leaf.grad * factor for name, leaf in leaves.items()}
    after = {name: leaf.detach() - rate * gradients[name] for name, leaf in leaves.items()}
    return gradients, norm, after


def _place(owner):
    """(layer, site, branch, side) of a norm's scale, None for what is no scale vector."""
    if owner == "decoder.final_layernorm":
        return None, "head", "logits", "in"
    for pattern, (site, branch, side) in _NORMS.items():
        found = re.fullmatch(_LAYER + pattern, owner)
        if found:
            return int(found[1]) + 1, site, branch or found[2], side
    return None


def _vectors(leaves):
    """Stored parts of every vector: (place, owner, {suffix: name})."""
    found = {}
    parts = r"(?:_(alpha|beta|magnitude|direction))?"
    for name in leaves:
        of_linear = re.fullmatch(r"(.*)\.gamma_(in|out)_([a-z_]+?)" + parts, name)
        of_norm = re.fullmatch(r"(.*)\.(?:gamma|weight)" + parts, name)
        if of_linear:
            owner, side, branch, suffix = of_linear.groups()
            site = "attention" if ".self_attention." in name else "mlp"
            place = int(re.match(_LAYER, owner)[1]) + 1, site, branch, side
        elif of_norm and leaves[name].requires_grad:
            owner, suffix = of_norm.groups()
            place = _place(owner)
            # The model's own q and k norms are no part of a strategy without an intermediate norm.
            if place is None or (name.endswith("weight") and place[3] == "out"):
                continue
        else:
            continue
        found.setdefault((place, owner), {})[suffix or ""] = name
    return [(place, owner, names) for (place, owner), names in found.items()]


def _gamma(names, values):
    if "beta" in names:
        return product(values[names["beta"]], values[names["alpha"]])
    if "magnitude" in names:
        return unit(values[names["magnitude"]], values[names["direction"]])
    return values[names[""]]


def _columns(place, owner, params):
    """The raw weight [rows, columns] whose columns a vector scales; None for norms and several weights."""
    layer, _, branch, side = place
    if side != "in" or owner.endswith(("layernorm", ".experts")):
        return None
    parts = params["layers"][layer - 1]
    if branch == "shared":
        branches = ("q", "k", "v") if owner.endswith("linear_qkv") else ("gate", "up")
        return torch.cat([parts[name].weight for name in branches if name in parts])
    expert = re.search(r"local_experts\.(\d+)\.", owner)
    if expert:
        return parts["experts"][int(expert[1])][branch.removeprefix("expert_")].weight
    return parts[branch].weight


def expected_telemetry(before, after, gradients, params):
    """Figures by (layer, site, branch, side), and cosines by the same with two branches joined by a dash.

    Args:
        before, after, gradients: Name to float64 tensor.
        params: What ``reference.gpt_logits`` takes, after the step.
    """
    after = {name: value.detach() for name, value in after.items()}
    grouped, on_one_linear = {}, {}
    for place, owner, names in _vectors(before):
        grouped.setdefault(place, []).append((owner, names))
        if place[3] == "in" and place[0] is not None:
            on_one_linear.setdefault(owner, []).append((place, names))
    figures = {}
    for place, members in grouped.items():
        gamma = torch.stack([_gamma(names, after) for _, names in members])
        change = gamma - torch.stack([_gamma(names, before) for _, names in members])
        scalars = [names.get("beta") or names.get("magnitude") for _, names in members]
        long = [next(n for s, n in names.items() if s not in ("beta", "magnitude")) for _, names in members]
        ones = torch.ones_like(gamma[0])
        found = {
            "vectors": len(members),
            "size": gamma.shape[1],
            "rms": float(gamma.pow(2).mean().sqrt()),
            "min": float(gamma.min()),
            "max": float(gamma.max()),
            "magnitude": None if scalars[0] is None else sum(float(after[n]) for n in scalars) / len(scalars),
            "drift": float(sum(1 - g @ ones / (g.norm() * ones.norm()) for g in gamma)) / len(members),
            "near_zero": float((gamma.abs() < 0.01).double().mean()),
            "gradient_rms": float(torch.stack([gradients[n] for n in long]).pow(2).mean().sqrt()),
            "magnitude_gradient": None
            if scalars[0] is None
            else math.sqrt(sum(float(gradients[n]) ** 2 for n in scalars) / len(scalars)),
            "update_ratio": float(change.norm() / (gamma - change).norm()),
            "lambda_min": None,
            "lambda_max": None,
            "condition": None,
        }
        weights = [_columns(place, owner, params) for owner, _ in members]
        if weights[0] is not None:
            # The matrices themselves: γ_j² I + w_j w_jᵀ of every column.
            spectra = [
                torch.linalg.eigvalsh(
                    g[j] ** 2 * torch.eye(len(w), dtype=w.dtype) + torch.outer(w[:, j], w[:, j])
                )
                for g, w in zip(gamma, (weight.detach() for weight in weights))
                for j in range(w.shape[1])
            ]
            found["lambda_min"] = min(float(s[0]) for s in spectra)
            found["lambda_max"] = max(float(s[-1]) for s in spectra)
            found["condition"] = max(float(s[-1] / s[0]) for s in spectra)
        figures[place] = found
    cosines = {}
    for members in on_one_linear.values():
        for (place, names), (other, other_names) in combinations(members, 2):
            one, two = _gamma(names, after), _gamma(other_names, after)
            key = (*place[:2], f"{place[2]}-{other[2]}", "in")
            cosines.setdefault(key, []).append(float(one @ two / (one.norm() * two.norm())))
    return figures, {key: sum(values) / len(values) for key, values in cosines.items()}

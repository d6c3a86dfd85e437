"""The precision graph: which operator computes each node of a model, and which precision its edges carry.

The training side and the rollout side each describe themselves as a `PrecisionGraph`, in the names of the Hugging Face
checkpoint. Log-probs can be equal to the bit only where the rollout's graph lies inside training's: every node of the
rollout's forward is a node of training's, with the same value in every field. Training has more, its backward.

Both sides name a kernel by the bytes that it gives: two kernels that are proven to give the same bytes have one name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal

type Side = Literal["training", "rollout"]
type Value = str | int | float | bool | tuple[int, int] | None
type Mend = Mapping[str, Mapping[str, str]]
"""Settings that change a field: by "operator.field", or by the name of a model-wide setting, then by the value that is
wanted, "*" for any other. Texts may hold {node}, {wanted}, and {value}: the side's own value."""

MODEL = "model"
"""Name that differences in model-wide settings carry instead of a node's."""

_INDEX = re.compile(r"^(.*?\.layers\.)(\d+)(\..*)$")
_ANY = "*"
_HEADINGS = ("name", "operator", "forward")
# Known on both sides or not compared: a configuration alone knows no weights, and where a checkpoint carries no recipe,
# that is the difference.
_OPTIONAL = frozenset({"cuda_extension", "weights", "weights_version", "ue8m0_weight_max", "weight_amax_floor"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Node:
    """One operator of the model, with what its edges carry. A field that means nothing for the operator is None.

    Attributes:
        name: Hugging Face name of the module, e.g. "model.layers.3.self_attn.q_proj"; q, k, v and gate, up are nodes of
            their own, however a side stores them.
        operator: "linear", "rms_norm", "rope", "attention", "swiglu", "residual_add", "embedding", "log_prob"; in
            training also "dgrad" and "wgrad".
        dtype: of the operator's own operand: a linear's weight, else what it reads.
        activation_dtype: of a linear's other operand.
        result: what the edge to the next node carries.
        weight_group, activation_group: elements that share a scale, (rows, columns).
        scale_format, activation_scale_format: "ue8m0" or "fp32".
        element_max, ue8m0_weight_max, weight_amax_floor, activation_amax_floor, activation_scale_floor: as in the
            recipe.
        quantizer: whose bytes a linear's activation codes are.
        kernel: whose bytes the result is.
        fused_by: the compiler pass that replaces the operator together with a neighbour.
        bias: whether a linear adds one.
        epsilon: of a norm.
        theta: base of RoPE.
        scaling: of RoPE's frequencies, "default" for none, "llama3 8" for Llama 3's by a factor of 8.
        window: tokens that attention sees, None for all.
        kv_splits: into how many parts attention cuts the cache: "1", "varying" if that depends on the batch,
            "2 ranks" where decode context parallelism cuts it.
        cascade: whether attention treats a common prefix by itself.
        cache_dtype: of keys and values as attention reads them.
        weights: digest of the bytes that a linear multiplies with, None if unknown.
        forward: whether log-probs depend on it.
    """

    name: str
    operator: str
    dtype: str
    activation_dtype: str | None = None
    result: str = "bfloat16"
    weight_group: tuple[int, int] | None = None
    activation_group: tuple[int, int] | None = None
    scale_format: str | None = None
    activation_scale_format: str | None = None
    element_max: float | None = None
    ue8m0_weight_max: float | None = None
    weight_amax_floor: float | None = None
    activation_amax_floor: float | None = None
    activation_scale_floor: float | None = None
    quantizer: str | None = None
    kernel: str | None = None
    fused_by: str | None = None
    bias: bool | None = None
    epsilon: float | None = None
    theta: float | None = None
    scaling: str | None = None
    window: int | None = None
    kv_splits: str | None = None
    cascade: bool | None = None
    cache_dtype: str | None = None
    weights: str | None = None
    forward: bool = True

    @property
    def quantized(self) -> bool:
        """Whether this is a linear with an FP8 weight."""
        return self.operator == "linear" and self.dtype.startswith("float8")

    def to_dict(self) -> dict[str, Any]:
        """Every field that means something, ready for JSON."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """One field in which the sides differ.

    Attributes:
        node: the node's name, "model" for a setting of the whole model, "rank N" for one of a rollout's ranks.
        field: the field of `Node`, the name of the setting, or "node" where one side lacks the node.
        training, rollout: both sides' values.
        setting: what to change, and on which side.
    """

    node: str
    field: str
    training: Value
    rollout: Value
    setting: str

    def __str__(self) -> str:
        return f"{self.node}: {self.field}: training {self.training}, rollout {self.rollout}; {self.setting}"

    def to_dict(self) -> dict[str, Any]:
        """Every field, ready for JSON."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NotPromised:
    """Something that has no proof of equal bytes, whatever the settings.

    Attributes:
        node: its name.
        side: where it was found.
        reason: why nothing can be promised.
        setting: the way out.
    """

    node: str
    side: Side
    reason: str
    setting: str

    def __str__(self) -> str:
        return f"{self.node} ({self.side}): not promised: {self.reason}; {self.setting}"

    def to_dict(self) -> dict[str, Any]:
        """Every field, ready for JSON."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionGraph:
    """One side's nodes and model-wide settings.

    Attributes:
        side: which side.
        nodes: in the order of the forward, each name once.
        settings: model-wide, e.g. "recipe" (fingerprint), "tensor_parallel", "weights_version"; the keys are those of
            `MODEL_SETTINGS`.
        faults: what is wrong on this side by itself, such as a rank that runs another recipe.
        not_promised: what nothing is known about.
        mend: settings of this side that change a field.

    Raises:
        ValueError: two nodes have one name, or a setting is unknown.
    """

    side: Side
    nodes: tuple[Node, ...]
    settings: Mapping[str, Value]
    faults: tuple[Difference, ...] = ()
    not_promised: tuple[NotPromised, ...] = ()
    mend: Mend = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [node.name for node in self.nodes]
        twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if twice:
            raise ValueError(f"nodes {twice} occur twice: a node's name is its module's, so give each module once")
        if set(self.settings) != set(MODEL_SETTINGS):
            raise ValueError(
                f"settings {sorted(self.settings)} of the {self.side} graph must be {sorted(MODEL_SETTINGS)}"
            )

    @property
    def by_name(self) -> dict[str, Node]:
        """The nodes by their names."""
        return {node.name: node for node in self.nodes}

    @property
    def fp8_linears(self) -> tuple[str, ...]:
        """Names of the linears with FP8 weights."""
        return tuple(node.name for node in self.nodes if node.quantized)

    def to_dict(self) -> dict[str, Any]:
        """Nodes, settings, faults and what is not promised, ready for JSON."""
        return {
            "side": self.side,
            "settings": dict(self.settings),
            "nodes": [node.to_dict() for node in self.nodes],
            "faults": [fault.to_dict() for fault in self.faults],
            "not_promised": [entry.to_dict() for entry in self.not_promised],
        }

    def to_markdown(self) -> str:
        """A table of the nodes; layers that are alike share a row."""
        alike: dict[Node, list[str]] = {}
        for node in self.nodes:
            alike.setdefault(dataclasses.replace(node, name=_pattern(node.name), weights=None), []).append(node.name)
        lines = [f"{key}: {value}" for key, value in self.settings.items() if value is not None]
        table = ["| node | operator | what it carries |", "|---|---|---|"]
        for node, names in alike.items():
            carried = {key: value for key, value in node.to_dict().items() if key not in _HEADINGS}
            text = ", ".join(f"{key} {value}" for key, value in carried.items())
            table.append(f"| {join_names(names)} | {node.operator} | {text} |")
        return "\n".join([f"{self.side}: " + "; ".join(lines), "", *table])


MODEL_SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        "recipe": "fingerprint of the recipe",
        "tensor_parallel": "ranks that share a layer",
        "dtype": "of what is not quantised",
        "layers": "decoder layers",
        "tied_head": "whether lm_head is the embedding",
        "weights_source": "who quantised the weights",
        "weights_version": "number of optimizer steps behind the weights, None if unknown",
        "speculative_decoding": "method, or none",
        "lora": "whether adapters are applied",
        "logprobs_mode": "which log-probs are compared",
        "other_fusions": "compiler passes that no node names",
        "cuda_extension": "whether norms and SwiGLU run the CUDA extension's kernels, not Triton's; None on a CPU",
    }
)
"""Model-wide settings of a graph, and what each means."""


def differences(training: PrecisionGraph, rollout: PrecisionGraph) -> list[Difference]:
    """Every field in which the rollout's forward is not training's, and the faults of each side by itself.

    Args:
        training, rollout: the graphs of whole models; see `merge` for the graphs of single ranks.

    Raises:
        ValueError: the graphs were given in the wrong order.
    """
    if (training.side, rollout.side) != ("training", "rollout"):
        raise ValueError(
            f"graphs of sides {training.side!r} and {rollout.side!r}: pass the training graph, then the rollout graph"
        )
    found = [*training.faults, *rollout.faults]
    for key in MODEL_SETTINGS:
        mine, theirs = training.settings[key], rollout.settings[key]
        if mine != theirs and not (key in _OPTIONAL and None in (mine, theirs)):
            found.append(_difference(MODEL, key, key, (mine, theirs), (training, rollout)))
    mine_by_name, theirs_by_name = training.by_name, rollout.by_name
    for node in rollout.nodes:
        if node.name not in mine_by_name:
            found.append(_missing(node, "training"))
            continue
        found.extend(_node_differences(mine_by_name[node.name], node, (training, rollout)))
    missing = [node for node in training.nodes if node.forward and node.name not in theirs_by_name]
    return [*found, *(_missing(node, "rollout") for node in missing)]


def contains(training: PrecisionGraph, rollout: PrecisionGraph) -> bool:
    """Whether the rollout graph lies inside the training graph."""
    return not differences(training, rollout)


def merge(graphs: Iterable[PrecisionGraph]) -> PrecisionGraph:
    """The graph of a whole model from those of its ranks.

    Pipeline ranks bring different nodes, tensor-parallel ranks the same ones; ranks that disagree about a node or a
    setting become faults.

    Args:
        graphs: one a rank, in the order of the ranks.

    Raises:
        ValueError: there are none.
    """
    graphs = list(graphs)
    if not graphs:
        raise ValueError("graphs is empty: give the graph of at least one rank")
    first = graphs[0]
    nodes: dict[str, Node] = {}
    faults = [fault for graph in graphs for fault in graph.faults]
    for rank, graph in enumerate(graphs):
        known = {**nodes}
        for node in graph.nodes:
            nodes.setdefault(node.name, node)
        both = [(known[node.name], node) for node in graph.nodes if node.name in known]
        unlike = [(node.name, key, a, b) for kept, node in both for key, a, b in _unlike(kept, node)]
        unlike += [(MODEL, k, v, graph.settings[k]) for k, v in first.settings.items() if v != graph.settings[k]]
        faults += [_between_ranks(rank, graph.side, *entry) for entry in unlike]
    notes = dict.fromkeys(entry for graph in graphs for entry in graph.not_promised)
    return dataclasses.replace(
        first, nodes=in_order(nodes.values()), faults=tuple(dict.fromkeys(faults)), not_promised=tuple(notes)
    )


def in_order(nodes: Iterable[Node]) -> tuple[Node, ...]:
    """The nodes in the order of the forward: embedding, decoder layers by number, then what follows them."""

    def place(node: Node) -> tuple[int, int]:
        layer = _INDEX.match(node.name)
        if layer:
            return 1, int(layer[2])
        return (0, 0) if node.operator == "embedding" else (2, 0)

    return tuple(sorted(nodes, key=place))


def join_names(names: Iterable[str]) -> str:
    """Names that differ in their layer alone as one: "model.layers.{0-27}.mlp.up_proj"."""
    names = list(names)
    layers = sorted({int(match[2]) for match in map(_INDEX.match, names) if match})
    patterns = list(dict.fromkeys(map(_pattern, names)))
    if len(patterns) > 1 or len(layers) < 2:
        return ", ".join(patterns if len(layers) > 1 else names)
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    text = ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return patterns[0].replace("{N}", "{" + text + "}")


def _pattern(name: str) -> str:
    match = _INDEX.match(name)
    return f"{match[1]}{{N}}{match[3]}" if match else name


def _unlike(mine: Node, theirs: Node) -> list[tuple[str, Value, Value]]:
    found = []
    for field in dataclasses.fields(Node):
        ours, other = getattr(mine, field.name), getattr(theirs, field.name)
        if ours != other and not (field.name in _OPTIONAL and None in (ours, other)):
            found.append((field.name, ours, other))
    return found


def _node_differences(mine: Node, theirs: Node, graphs: tuple[PrecisionGraph, PrecisionGraph]) -> list[Difference]:
    unlike = _unlike(mine, theirs)
    if mine.operator != theirs.operator or mine.dtype != theirs.dtype:
        # What follows from the first difference would only hide it.
        unlike = [entry for entry in unlike if entry[0] in ("operator", "dtype")]
    return [_difference(mine.name, key, f"{mine.operator}.{key}", (ours, other), graphs) for key, ours, other in unlike]


def _difference(
    node: str, field: str, key: str, values: tuple[Value, Value], graphs: tuple[PrecisionGraph, PrecisionGraph]
) -> Difference:
    training, rollout = values
    texts = []
    for graph, wanted, value in ((graphs[1], training, rollout), (graphs[0], rollout, training)):
        ways = graph.mend.get(key, {})
        way = ways.get(str(wanted), ways.get(_ANY))
        if way:
            texts.append(f"{graph.side}: " + way.format(node=node, wanted=wanted, value=value))
    setting = "; or ".join(texts) or "no setting makes them equal: change the model that one side builds"
    return Difference(node=node, field=field, training=training, rollout=rollout, setting=setting)


def _missing(node: Node, side: Side) -> Difference:
    training, rollout = (None if side == absent else node.operator for absent in ("training", "rollout"))
    setting = f"{side}: it lacks this {node.operator}: build both sides from one model, with all its ranks"
    return Difference(node=node.name, field="node", training=training, rollout=rollout, setting=setting)


def _between_ranks(rank: int, side: Side, node: str, field: str, first: Value, value: Value) -> Difference:
    return Difference(
        node=f"rank {rank}",
        field=f"{node} {field}",
        training=first,
        rollout=value,
        setting=f"{side}: ranks disagree ({first} elsewhere, {value} here): build every rank from one specification",
    )

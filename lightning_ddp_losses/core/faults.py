"""The known faults: one table gives each its severity and its name; the README's troubleshooting table has one row for each.

An *error* makes ranks train something else than one process would, or ends in a hang; a *warning* is likely a mistake and may be
meant; a *note* is worth knowing. A healthy run has no error and no warning.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

Severity: TypeAlias = Literal["error", "warning", "note"]


class Fault(NamedTuple):
    """One known way to go wrong."""

    severity: Severity
    title: str


_ERRORS = {
    "F01": "trainable parameters in no optimizer",
    "F02": "trainable parameters outside the LightningModule",
    "F03": "parameters in memory that the ranks share",
    "F04": "parameters that start different per rank",
    "F05": "parameters created after the wrap",
    "F06": "parameters replaced after the wrap",
    "F07": "a parameter that changed its dtype or device",
    "F08": "parameters unfrozen after the wrap",
    "F09": "a backward without the wrapper's forward",
    "F10": "manual optimisation without manual_backward",
    "F11": "a first step that was not reduced",
    "F12": "parameters of another name, order, shape or dtype per rank",
    "F13": "gradients that clipping makes differ per rank",
    "F14": "an optimizer step skipped on some ranks",
    "F15": "gradient scales that differ per rank",
    "F16": "class shards that do not tile the classes",
    "F17": "optimizer settings that differ per rank",
    "F20": "a gather without gradients",
    "F21": "a global loss multiplied by the world size",
    "F22": "world size scaling where nothing was gathered",
    "F23": "an in-place all-reduce inside a loss",
    "F24": "a loss parameter's gradient W times too large",
    "F25": "labels offset by rank where nothing was gathered",
    "F26": "rank-dependent order of gathered rows",
    "F27": "a metric as a loss, with 1/W of its gradient",
    "F28": "tensor sizes that differ in a collective",
    "F32": "a loss parameter out of the graph on some ranks",
    "F35": "a step without a loss on some ranks",
    "F36": "numbers of batches that differ",
    "F37": "a branch taken on some ranks",
    "F38": "a loss that is active on some steps",
    "F40": "a parameter marked ready twice",
    "F41": "two forwards before backward while buffers differ",
    "F42": "an exception on one rank",
    "F43": "a signal handled on one rank",
    "F44": "one rank far behind",
    "F45": "a collective in rank-zero-only code",
    "F46": "log keys that differ per rank",
    "F47": "collectives that pair up wrongly",
    "F49": "metric state overwritten by the buffer broadcast",
    "F50": "a metric or loss on another device",
    "F51": "different numbers of metric updates",
    "F52": "a metric state of another shape or dtype per rank",
    "F53": "a metric computed on some ranks",
    "F55": "a monitored value that differs per rank",
    "F60": "batch norm that was not converted",
    "F61": "synchronised batch norm that a rank does not run",
    "F62": "a batch of one sample under batch norm",
    "F63": "synchronised batch norm on uneven sizes",
    "F64": "a memory queue that differs per rank",
    "F65": "a memory queue without its position",
    "F66": "a buffer assigned anew",
    "F67": "the same batch on every rank",
    "F68": "a sampler that is reshuffled",
    "F69": "another permutation on each rank",
    "F71": "an iterable dataset that is not divided",
    "F73": "DataParallel, or a device that ranks share",
    "F75": "loss parameters missing from the checkpoint",
    "F77": "values that differ after loading",
    "F78": "loss weights in half precision",
    "F79": "a loss or gradient that is not finite",
    "F80": "compiled collectives",
    "F81": "buffers of a dtype that cannot travel",
    "SYNC": "parameters or gradients that differ between ranks",
    "STEP": "an optimizer step that changes nothing",
    "CHECK": "a check that failed by itself",
}
_WARNINGS = {
    "F30": "a mean of means over different counts",
    "F31": "a loss of exactly zero, or no positive pair",
    "F39": "find_unused_parameters without need",
    "F54": "samples that validation counts twice",
    "F57": "metric synchronisation that takes the time",
    "F59": "batch-norm statistics that differ per rank",
    "F70": "the same order in every epoch",
    "F76": "a checkpoint of another world size",
    "F82": "a logged epoch mean over too few rows",
}
_NOTES = {
    "F18": "what a batch and a learning rate mean",
    "F29": "a contrastive loss that sees one rank's rows",
    "F33": "accumulation is not a larger contrastive batch",
    "F56": "what a printed loss stands for",
    "IDLE": "devices left idle",
    "TWICE": "a parameter in two optimizers",
    "DETACHED": "a module whose gradient is zero",
    "F72": "the same random numbers on every rank",
}
FAULTS: dict[str, Fault] = {
    **{key: Fault("error", title) for key, title in _ERRORS.items()},
    **{key: Fault("warning", title) for key, title in _WARNINGS.items()},
    **{key: Fault("note", title) for key, title in _NOTES.items()},
}

# gradients that stay each rank's own: something came after the wrap, or backward went past it
UNREDUCED_AFTER_WRAP = ("F05", "F06", "F07", "F08", "F09", "F10", "F11")
_UNREDUCED = ("F02", "F03", *UNREDUCED_AFTER_WRAP, "F12")
# faults by which ranks go apart: of what comes after the first of them nobody can say that it has a cause of its own
_SPREADING = (*_UNREDUCED, "F04", "F13", "F14", "F15", "F17", "SYNC")
FOLLOWING: dict[str, frozenset[str]] = {
    "F79": frozenset({"F79", "F14"}),
    **{fault: frozenset({fault, "SYNC"}) for fault in _SPREADING},
    **{fault: frozenset({fault, "F04", "F13", "F14", "SYNC"}) for fault in _UNREDUCED},
}
"""By fault, the faults that it brings along, itself seen elsewhere among them."""

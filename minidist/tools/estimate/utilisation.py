"""How much of the hardware's peak a step takes: of what the model needs (MFU), and of what is computed (HFU)."""

import math
from dataclasses import dataclass

from minidist.errors import UserError


@dataclass(frozen=True)
class Measured:
    """A step that took so long, on accelerators of this dense peak each."""

    step_time_s: float
    peak_tflops: float

    def of(self, flops: float, ranks: int) -> float:
        """A fraction: PaLM (arXiv 2204.02311, appendix B) for model FLOPs, Korthikanti et al. 2022 (arXiv 2205.05198,
        section 6.3) for both."""
        return flops / (self.step_time_s * ranks * self.peak_tflops * 1e12)


def measured(step_time_s: float | None, peak_tflops: float | None) -> Measured | None:
    """Both, or None when neither is given. Raises UserError for one alone, and for what is not above 0."""
    given = {"step-time-s": step_time_s, "peak-tflops": peak_tflops}
    for name, value in given.items():
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{name} is {value}; it must be above 0: change --{name}.")
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == 1:
        raise UserError(
            "utilisation needs the time of a step and the peak of an accelerator, and one is missing: "
            f"give --{missing[0]} too."
        )
    return None if missing else Measured(step_time_s, peak_tflops)


def document(found: Measured | None, model_flops: float, hardware_flops: float, ranks: int) -> dict[str, float | None]:
    """`mfu` and `hfu`, fractions, of these FLOPs of a step; None when no step was measured."""
    flops = {"mfu": model_flops, "hfu": hardware_flops}
    return {name: None if found is None else found.of(value, ranks) for name, value in flops.items()}


def line(found: Measured, model_flops: float, hardware_flops: float, ranks: int) -> str:
    """The same for a person."""
    used = document(found, model_flops, hardware_flops, ranks)
    return (
        f"MFU {100 * used['mfu']:.2f} %, HFU {100 * used['hfu']:.2f} %: {found.step_time_s:g} s a step on {ranks} x "
        f"{found.peak_tflops:g} TFLOP/s"
    )

"""`minidist estimate --mtbf-s`: how often a run should save, and what failures and saves will cost it."""

from minidist.errors import UserError
from minidist.tools.estimate.goodput import FailureModel


def parse_failure_model(mtbf_s: float | None, save_s: float | None, restart_s: float | None) -> FailureModel | None:
    """Return the model that the options describe; None if none of them is given. Raises UserError for a part of one."""
    options = {"--mtbf-s": mtbf_s, "--save-s": save_s, "--restart-s": restart_s}
    if all(value is None for value in options.values()):
        return None
    missing = [name for name in ("--mtbf-s", "--save-s") if options[name] is None]
    if missing:
        given = " ".join(f"{name} {value:g}" for name, value in options.items() if value is not None)
        raise UserError(
            f"{given} without {' and '.join(missing)}: the best checkpoint interval needs the mean time between "
            "failures of the whole run (--mtbf-s) and the time for which a save stalls it (--save-s), in seconds."
        )
    try:
        return FailureModel(mtbf_s, save_s, restart_s or 0.0)
    except ValueError as error:
        raise UserError(f"--{str(error).replace('_', '-', 1)}.") from None


def failures_json(model: FailureModel | None) -> dict[str, float]:
    """The figures for `--json`, modelled; empty without a model.

    interval_..._s: useful seconds between two saves, by Young, by Daly, and the exact minimum. waste_first_order: at
    Young's interval. goodput: the useful fraction of time at the exact interval.
    """
    if model is None:
        return {}
    return {
        "interval_young_s": model.young_interval_s(),
        "interval_daly_s": model.daly_interval_s(),
        "interval_exact_s": model.exact_interval_s(),
        "waste_first_order": model.first_order_waste(model.young_interval_s()),
        "goodput": model.goodput(model.exact_interval_s()),
    }


def print_failures(model: FailureModel | None) -> None:
    """Print the same figures for a person; nothing without a model."""
    if model is None:
        return
    young, daly, exact = model.young_interval_s(), model.daly_interval_s(), model.exact_interval_s()
    costs = f"{model.save_s:g} s per save, {model.restart_s:g} s per restart"
    useful, wasted = model.goodput(exact), model.first_order_waste(young)
    print(f"failures (modelled): one per {model.mtbf_s:g} s on average, {costs}")
    print(f"best time between saves: {exact:.4g} s (Young {young:.4g} s, Daly {daly:.4g} s)")
    print(f"goodput: {useful:.2%} of the time is useful; to first order, {wasted:.2%} is wasted")

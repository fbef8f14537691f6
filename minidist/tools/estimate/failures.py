"""`minidist estimate --mtbf-s`: how often a run should save, and what failures and saves will cost it."""

from minidist.errors import UserError
from minidist.tools.estimate.goodput import FailureModel


def parse_failure_model(mtbf_s: float | None, save_s: float | None, restart_s: float | None) -> FailureModel | None:
    """Make a `FailureModel` from the options `--mtbf-s`, `--save-s` and `--restart-s`; None if none of them is given.

    Raises UserError if one is given without both `--mtbf-s` and `--save-s`, or if a value is out of range.
    """
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


def checkpoint_intervals_json(model: FailureModel | None) -> dict[str, float]:
    """Return the entries of the `--json` document about checkpoints and failures; an empty dict if `model` is None.

    interval_young_s, interval_daly_s, interval_exact_s: the best time between two saves, in seconds of useful work, by
    each formula. waste_first_order: the wasted fraction of time at Young's interval, to first order. goodput: the
    useful fraction of time at the exact interval. All are modelled.
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


def print_checkpoint_intervals(model: FailureModel | None) -> None:
    """Print the best time between two saves by each formula, and the goodput; print nothing if `model` is None."""
    if model is None:
        return
    young, daly, exact = model.young_interval_s(), model.daly_interval_s(), model.exact_interval_s()
    costs = f"{model.save_s:g} s per save, {model.restart_s:g} s per restart"
    useful, wasted = model.goodput(exact), model.first_order_waste(young)
    print(f"failures (modelled): one per {model.mtbf_s:g} s on average, {costs}")
    print(f"best time between saves: {exact:.4g} s (Young {young:.4g} s, Daly {daly:.4g} s)")
    print(f"goodput: {useful:.2%} of the time is useful; to first order, {wasted:.2%} is wasted")

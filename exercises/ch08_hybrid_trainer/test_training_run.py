"""Tests of training_run: runs beside one process in float64, and runs of which the engine's steps are prescribed."""

import contextlib
import math

import torch

from exercises.checkpoint_calls import CheckpointCalls
from exercises.small_trainer import expect_same_state, make_trainer, shared_folder
from exercises.testing import Wrong, expect, test
from minidist.comm import CommError, World, barrier
from minidist.config import MeshConfig
from minidist.data.corpus import open_corpus
from minidist.data.loader import Loader, evaluation_loader
from minidist.errors import RunError
from minidist.models.dropout import DropoutAddress
from minidist.models.init import init_parameters
from minidist.models.transformer import Transformer
from minidist.simple.mixed_precision import Decision
from minidist.simple.training_state import Progress

DISK = CheckpointCalls()
TOLERANCE = 1e-9  # a few steps of AdamW in float64
FP64 = {"precision__policy": "fp64", "optim__warmup_steps": 2}
FP16 = {"precision__policy": "fp16", "precision__growth_interval": 3, "precision__initial_scale": 64.0}
# How the data are divided, by world size; of 7 samples the data shards have 5 and 2.
DIVIDED = {1: {}, 2: {}, 4: {"mesh": MeshConfig(dp=2, tp=2)}}
UNEVEN = {"data__shares": (2.5, 1.0), "data__weights": (1.0, 0.5)}


class Events:
    """An observer that notes all events, with the number of the step; `losses` are those of the steps.

    models: the step and the number of models of each evaluation; evaluated: the losses. disk_calls: the number of calls
    in `DISK` at each `on_checkpoint`. ended: the arguments of `on_end`. dies_after: the number of the step after which
    the run is killed.
    """

    def __init__(self):
        self.noted, self.losses, self.models, self.evaluated, self.trainer = [], [], [], [], None
        self.disk_calls, self.ended, self.dies_after = [], (), None

    def on_step(self, trainer, decision):
        self.trainer = trainer
        self.noted.append(f"step {trainer.progress.step}")
        self.losses.append(decision.loss)
        if trainer.progress.step == self.dies_after:
            raise KeyboardInterrupt

    def on_evaluation(self, step, loss, num_models):
        self.noted.append("evaluation")
        self.models.append((step, num_models))
        self.evaluated.append(loss)

    def on_checkpoint(self, path):
        self.noted.append(f"save of {path.name}")
        self.disk_calls.append(len(DISK.calls))

    def on_last_step(self, trainer):
        self.noted.append("last step")

    def on_end(self, trainer, summary):
        self.noted.append("end")
        self.ended = trainer, summary


def make_run(answer, world, folder, name, **changes):
    """Return the answer's trainer in a folder of this name, and its observer."""
    events, written = Events(), answer.Trainer
    # The constructor is given, and may draw random numbers and make process groups.
    constructor = getattr(written.__init__, "__wrapped__", written.__init__)
    given = {"__init__": constructor, "__module__": written.__module__}
    trainer_class = type("Trainer", (written,), given)
    trainer = make_trainer(world, folder, 0, trainer_class, [events], folder=folder / name, **changes)
    compare = trainer.compare_replicas

    def compare_replicas():
        events.noted.append("comparison of digests")
        compare()

    trainer.compare_replicas = compare_replicas
    return trainer, events


class OneProcess:
    """The run of one process on the unsplit model in float64. losses: of its steps."""

    def __init__(self, folder, config, sizes, weights):
        self.config, self.sizes, self.weights = config, sizes, weights
        corpus = open_corpus("stdlib", folder / "text", config.data.seq_len)
        self.data = Loader(corpus.train, config.data.seq_len, config.train.seed)
        self.held_out = evaluation_loader(corpus.held_out, config.data.seq_len, config.train.eval_samples)
        self.model = Transformer(config.model)
        init_parameters(self.model, config.train.seed)
        self.model.double()
        optim = config.optim
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1.0, optim.betas, optim.eps, optim.weight_decay)
        self.losses = []

    def train(self, steps):
        """Take this many steps."""
        for step in range(len(self.losses), len(self.losses) + steps):
            self.model.train()
            self.optimizer.zero_grad()
            batch = self.data.global_batch(step * sum(self.sizes), sum(self.sizes))
            total = tokens = 0.0
            parts = zip(batch.tokens.split(self.sizes), batch.labels.split(self.sizes), self.weights, strict=True)
            for (words, labels, weight), samples in zip(parts, batch.samples.split(self.sizes), strict=True):
                address = DropoutAddress(self.config.train.seed, step, samples, torch.arange(words.shape[1]))
                loss_sum, count = self.model(words, labels, address=address)
                total, tokens = total + weight * loss_sum, tokens + weight * count
            loss = total / tokens
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optim.clip_norm, foreach=False)
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate(step)
            self.optimizer.step()
            self.losses.append(loss.item())

    def rate(self, step):
        """Return the learning rate: a linear warm-up, then a cosine to a tenth."""
        highest, warm_up, steps = self.config.optim.lr, self.config.optim.warmup_steps, self.config.train.steps
        if step < warm_up:
            return highest * (step + 1) / (warm_up + 1)
        return highest * (0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / (steps - warm_up)))

    @torch.no_grad()
    def held_out_loss(self):
        """Return the mean loss of all held-out tokens."""
        self.model.eval()
        batch = self.held_out.global_batch(0, self.held_out.num_samples)
        total, tokens = self.model(batch.tokens, batch.labels)
        return (total / tokens).item()


@test(points=5, ranks=(1, 2, 4))
def trains_as_one_process(answer, world, network):
    """Losses and held-out loss of a run are those of one process, with shares, weights, and 7 samples per step."""
    uneven = {} if world.size == 1 else UNEVEN
    sizes, weights = ((7,), (1.0,)) if world.size == 1 else ((5, 2), (1.0, 0.5))
    with shared_folder(world, network.group) as folder:
        changes = {**FP64, **uneven, **DIVIDED[world.size], "train__global_batch": 7, "train__steps": 4}
        trainer, events = make_run(answer, world, folder, "values", train__eval_samples=5, **changes)
        summary = trainer.run()
        one, case = OneProcess(folder, trainer.config, sizes, weights), f"data shards with {sizes} samples per step"
        one.train(4)
        expect("the losses of the steps", events.losses, one.losses, case=case, tolerance=TOLERANCE)
        expect("the held-out loss", summary["held_out_loss"], one.held_out_loss(), case=case, tolerance=TOLERANCE)


@test(points=3, ranks=(1, 3))
def evaluation_has_each_sample_once(answer, world, network):
    """The held-out loss is that of one process for numbers of samples that do not divide, in small micro-batches."""
    with shared_folder(world, network.group) as folder:
        for samples, batch, micro_batches in ((7, 5, 2), (1, 12, 1), (8, 2, 4)):
            changes = {"train__eval_samples": samples, "train__global_batch": batch}
            changes["train__micro_batches"] = micro_batches
            trainer, _ = make_run(answer, world, folder, "evaluation", **FP64, **changes)
            given, evaluate = [], trainer.engine.evaluate

            def note_evaluation(batches, given=given, evaluate=evaluate):
                given.extend(len(each.samples) for each in batches)
                return evaluate(batches)

            trainer.engine.evaluate = note_evaluation
            case = f"{samples} held-out samples, global_batch {batch}, {micro_batches} micro-batches"
            wanted = OneProcess(folder, trainer.config, (batch,), (1.0,)).held_out_loss()
            expect("the result of evaluate", trainer.evaluate(), wanted, case=case, tolerance=TOLERANCE)
            expect("a held-out loss after the second call", trainer.evaluate(), wanted, case=case, tolerance=TOLERANCE)
            largest = -(-max(1, batch // micro_batches) // world.size)
            is_small = all(number <= largest for number in given)
            expect(f"whether this rank's micro-batches have at most {largest} samples", is_small, True, case=case)


def prescribe(trainer, decisions=None, stops=()):
    """Replace the engine's step and evaluation: no training. Returns a list of each step's number, samples and weight.

    decisions: those of the steps, by number; the others are good. stops: steps in which some rank asks for the end.
    """
    given = []

    def step(step, batches, lr, weight=1.0, stop_requested=False):
        given.append((step, [each.samples.tolist() for each in batches], weight))
        good = Decision(2.5, 100.0, 1.0, True, True, False, step in stops)
        return (decisions or {}).get(step, good)

    trainer.engine.step, trainer.engine.evaluate = step, lambda batches: 1.5
    return given


def number_of_steps(events):
    return sum(event.startswith("step ") for event in events)


@test(points=5, ranks=(1, 2))
def everything_in_its_order(answer, world, network):
    """Steps, digests, evaluations and saves follow each other as the options say, and so does a stop."""
    compare, evaluate = "comparison of digests", "evaluation"
    save2, save3, save6, save7 = (f"save of step-0000000{step}" for step in (2, 3, 6, 7))
    cases = {
        (7, 3, 2, 3, None): [
            *("step 1", "step 2", compare, "step 3", compare, evaluate, save3, "step 4", compare, "step 5"),
            *("step 6", compare, evaluate, save6, "step 7", compare, save7, "last step", evaluate, "end"),
        ],
        (2, 0, 0, 1, None): ["step 1", evaluate, "step 2", save2, "last step", evaluate, "end"],
        (5, 0, 4, 2, 1): ["step 1", "step 2", compare, save2, "last step", "end"],
        (2, 5, 0, 0, 1): ["step 1", "step 2", save2, "last step", evaluate, "end"],
    }
    with shared_folder(world, network.group) as folder:
        for (steps, every, digests, evaluations, stop), wanted in cases.items():
            options = {"train__steps": steps, "checkpoint__every": every, "fault__digest_every": digests}
            options |= {"train__eval_every": evaluations, "checkpoint__keep": 2}
            name = f"run {steps} {every} {stop}"
            trainer, events = make_run(answer, world, folder, name, **options)
            given = prescribe(trainer, stops=(stop,))
            DISK.skipped = {"prune"} if world.rank else set()
            before, summary = len(DISK.calls), trainer.run()
            case = f"train.steps {steps}, checkpoint.every {every}, digest_every {digests}, eval_every {evaluations}"
            case += "" if stop is None else f", a rank asks for the end in step {stop + 1}"
            for at in range(max(len(wanted), len(events.noted))):  # the first difference is what helps
                told = f"{case}; after {' | '.join(wanted[max(0, at - 2) : at])}"
                expect(
                    "the next event", *[(each[at : at + 1] or [None])[0] for each in (events.noted, wanted)], case=told
                )
            expect("whether on_step gets the trainer", events.trainer is trainer, True, case=case)
            is_right = events.ended[0] is trainer and events.ended[1] == summary
            expect("whether on_end gets the trainer and the summary", is_right, True, case=case)
            models = [(number_of_steps(wanted[:at]), 1) for at, event in enumerate(wanted) if event == evaluate]
            expect("the steps and numbers of models of the evaluations", events.models, models, case=case)
            expect("the losses that on_evaluation gets", events.evaluated, [1.5] * len(models), case=case)
            done = wanted.count("evaluation") and wanted[-2] == "evaluation"
            completed = number_of_steps(wanted)
            expected = {"step": completed, "stopped": completed < steps, "folder": str(folder / name)}
            expected |= {"held_out_loss": 1.5} if done else {}
            expect("the summary", summary, expected, case=case)
            expect("the numbers of the engine's steps", [each[0] for each in given], list(range(completed)), case=case)
            calls = [(kind, path.name) for kind, path in DISK.calls[before:]]
            kinds = ("save", "prune") if world.rank == 0 else ("save",)
            names = [event.removeprefix("save of ") for event in wanted if event.startswith("save of ")]
            saved = [(kind, name) for name in names for kind in kinds]
            expect("the calls of save and prune", calls, saved, case=f"{case}; rank {world.rank}")
            counts = [at - before for at in events.disk_calls]
            due = [len(kinds) * (at + 1) for at in range(len(names))]
            expect(
                "the number of these calls before each on_checkpoint", counts, due, case=f"{case}; rank {world.rank}"
            )
            if not summary["stopped"]:
                events.noted.clear()
                expect("the summary", trainer.run(), summary, case=f"{case}; run is called again, after the last step")
                told = ["last step", evaluate, "end"]
                expect("the events", events.noted, told, case=f"{case}; run is called again, after the last step")
        kept = sorted(path.name for path in (folder / "run 7 3 None" / "checkpoints").iterdir())
        expect("the checkpoints that are left", kept, ["step-00000006", "step-00000007"], case="checkpoint.keep 2")


@test(points=2, ranks=(2,))
def a_stop_of_one_rank_ends_all(answer, world, network):
    """One rank asks for the end at a step of its own; all ranks end after this step, with a checkpoint of it."""
    with shared_folder(world, network.group) as folder:
        for asking in (0, 1):
            trainer, _ = make_run(answer, world, folder, f"stop {asking}", train__steps=6)
            steps = {asking: 1}.get(world.rank)  # after which this rank asks
            trainer.is_stop_requested = lambda trainer=trainer, steps=steps: trainer.progress.step == steps
            summary, case = trainer.run(), f"rank {asking} of 2 asks for the end during the second step of 6"
            expected = {"step": 2, "stopped": True, "folder": str(folder / f"stop {asking}")}
            expect("the summary", summary, expected, case=case)
            names = sorted(path.name for path in (trainer.folder / "checkpoints").iterdir())
            expect("the checkpoints", names, ["step-00000002"], case=case)


@test(points=5, ranks=(1, 2))
def resumed_run_is_the_same_run(answer, world, network):
    """Stopped and resumed, a run has the losses and all tensors of one without a stop, bit by bit."""
    with shared_folder(world, network.group) as folder:
        for changes in [FP16] if world.size == 1 else [{"zero__stage": 2}]:
            changes = {**changes, "train__steps": 6, "optim__warmup_steps": 2, "fault__digest_every": 2}
            whole, events = make_run(answer, world, folder, "whole", **changes)
            whole.run()
            losses, case = {}, "checkpoint.every 2, killed after step 3, stopped after step 4, 6 steps in all"
            for stop in (None, 4, 6):
                part, own = make_run(answer, world, folder, "parts", checkpoint__every=2, **changes)
                first = part.progress.step
                if stop is None:
                    own.dies_after = 3
                part.is_stop_requested = lambda part=part, stop=stop: part.progress.step + 1 == stop
                with contextlib.suppress(KeyboardInterrupt):
                    part.run()
                losses |= dict(enumerate(own.losses, first))
            expect("the losses of all steps", [losses[step] for step in range(6)], events.losses, case=case)
            expect_same_state(part, whole, case)
        if world.size == 2:
            goes_on_with_more_ranks(answer, world, network, folder)


def goes_on_with_more_ranks(answer, world, network, folder):
    """One rank takes two steps; two ranks go on, with another batch size. Intervals count all steps of the run."""
    case = "one rank took 2 steps of 12 samples; two go on with 7 samples per step"
    if world.rank == 0:
        alone, _ = make_run(answer, World.single(), folder, "more", **FP64, train__steps=5)
        alone.is_stop_requested = lambda: alone.progress.step == 1
        alone.run()
    barrier(network.group)
    changes = {**FP64, "train__steps": 5, "train__global_batch": 7, "checkpoint__every": 3, "train__eval_every": 4}
    trainer, events = make_run(answer, world, folder, "more", **changes)
    given = prescribe(trainer)
    trainer.run()
    wanted = ["step 3", "save of step-00000003", "step 4", "evaluation", "step 5", "save of step-00000005"]
    intervals = f"{case}; checkpoint.every 3, eval_every 4"
    expect("the events after two steps", events.noted, [*wanted, "last step", "evaluation", "end"], case=intervals)
    samples = [sum(batches, []) for _, batches, _ in given]
    own = [list(range(24 + 7 * at, 28 + 7 * at)) for at in range(3)]
    if world.rank == 1:
        own = [list(range(28 + 7 * at, 31 + 7 * at)) for at in range(3)]
    expect("the samples of this rank's steps", samples, own, case=case)
    expect("the numbers of the steps", [each[0] for each in given], [2, 3, 4], case=case)
    expect("the weights of this rank's data", [each[2] for each in given], [1.0] * 3, case=case)
    expect("progress in the end", (trainer.progress.step, trainer.progress.consumed_samples), (5, 45), case=case)


@test(points=3, ranks=(1, 2))
def what_is_not_finite_ends_the_run(answer, world, network):
    """An overflow is a skipped step that counts; too many of them, or a loss that is not finite, raise RunError."""
    overflow = Decision(2.5, 100.0, math.nan, False, False, True, False)
    no_loss = Decision(math.nan, 100.0, math.nan, False, False, False, False)
    no_tokens = Decision(None, 0.0, 0.0, False, True, False, False)
    with shared_folder(world, network.group) as folder:
        for policy in ("fp16", "fp32"):
            trainer, _ = make_run(answer, world, folder, policy, precision__policy=policy, precision__max_overflows=2)
            decisions = {1: no_tokens, 2: overflow if policy == "fp16" else no_tokens, 3: no_loss}
            prescribe(trainer, decisions)
            for step in range(3):
                case = f"{policy}; step {step}; step 1 has no tokens" + ", step 2 overflows" * (policy == "fp16")
                try:
                    trainer.step()
                except RunError as error:
                    raise Wrong("wrong", "step must not end this run", "a Decision", str(error)[:80], case) from error
                progress = trainer.progress.step, trainer.progress.consumed_samples
                expect("progress: steps and samples", progress, (step + 1, 12 * (step + 1)), case=case)
            expect_run_error(trainer, Progress(3, 36), f"{policy}; the loss of step 3 is NaN")
        trainer, _ = make_run(answer, world, folder, "fp16", precision__policy="fp16", precision__max_overflows=2)
        trainer.engine.scaler.overflowed = [4.0, 2.0]
        prescribe(trainer, {0: overflow})
        expect_run_error(trainer, Progress(0, 0), "2 consecutive overflows, and max_overflows is 2")


def expect_run_error(trainer, progress, case):
    try:
        trainer.step()
    except RunError as error:
        expect("whether the error is one of the connection", isinstance(error, CommError), False, case=case)
    else:
        raise Wrong("wrong", "step must raise RunError on all ranks", "RunError", "it returned", case=case)
    expect("whether progress is as it was", trainer.progress == progress, True, case=case)


@test(points=1, ranks=(2,))
def failed_removal_is_an_error_of_all(answer, world, network):
    """If rank 0 cannot delete old checkpoints, all ranks raise RunError."""
    with shared_folder(world, network.group) as folder:
        trainer, _ = make_run(answer, world, folder, "removal")
        prescribe(trainer)
        trainer.step()
        DISK.failing.add("prune")
        try:
            trainer.save()
        except RunError as error:
            expect("whether the error is one of the connection", isinstance(error, CommError), False)
        except OSError as error:
            raise Wrong("wrong", "save must raise RunError on all ranks", "RunError", "OSError on rank 0") from error
        else:
            raise Wrong("wrong", "save must raise RunError on all ranks", "RunError", "it returned")
        finally:
            DISK.failing.clear()


@test(points=2, ranks=(2,))
def replicas_stop_at_merges(answer, world, network):
    """Replicas that train separately stop at the next merge, all of them; evaluations tell how many models differ."""
    local = {"consistency__mode": "local", "consistency__h": 3, "train__steps": 8}
    with shared_folder(world, network.group) as folder:
        trainer, events = make_run(answer, world, folder, "local", train__eval_every=1, **local)
        asking = "step 4", "step 5", "step 6"  # the last events before rank 1 asks
        trainer.is_stop_requested = lambda: world.rank == 1 and bool({*asking} & {*events.noted[-1:]})
        case = "local SGD, a merge every 3 steps; rank 1 asks for the end after on_step of step 4, 5 and 6"
        summary = trainer.run()
        expect("step and stopped", (summary["step"], summary["stopped"]), (6, True), case=case)
        models = [(1, 2), (2, 2), (3, 1), (4, 2), (5, 2)]
        expect("step and number of models of the evaluations", events.models, models, case=case)

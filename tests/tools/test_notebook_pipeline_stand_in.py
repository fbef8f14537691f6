"""The pipeline whose stages count time: live ranks give the times that the simulator computes."""

import pytest

from minidist.comm import World
from minidist.parallel.pipeline.schedules import build_schedule
from minidist.simple import pipeline
from minidist.tools.notebook.pipeline_stand_in import count_stage_time, make_stage_executor
from minidist.tools.simulate.timeline import StageTimes, simulate_schedule

SCHEDULES = {"gpipe": pipeline.gpipe, "1f1b": pipeline.one_f_one_b}


def run_pipeline(world: World, kind: str, num_micro_batches: int, forward_times: list[int]) -> list:
    return count_stage_time(world, SCHEDULES[kind], num_micro_batches, forward_times[world.rank])


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("forward_times", [[1], [1, 1, 1], [2, 1, 3]])
def test_live_ranks_give_the_times_of_the_simulator(ranks, kind, forward_times):
    found = ranks(run_pipeline, len(forward_times), kind, 5, forward_times)
    times = StageTimes(forward_times, forward_times, forward_times)  # backward: of the input, and of the weights
    simulated = simulate_schedule(build_schedule(kind, len(forward_times), 5), times)
    assert found == [[(span.start, span.end) for span in spans] for spans in simulated.spans]


def replace_executor(world: World) -> bool:
    original, pipeline.PipelineExecutor = pipeline.PipelineExecutor, lambda *arguments: arguments
    try:
        return isinstance(make_stage_executor(world, pipeline.gpipe, 1), tuple)
    finally:
        pipeline.PipelineExecutor = original


def test_the_learners_executor_runs(ranks):
    assert ranks(replace_executor, 2) == [True, True]

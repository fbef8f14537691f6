"""one_micro_batch (raised): every hook uses the name of the last parameter"""

from minidist.parallel.data.reducer import trainable


def collect(parameters, sink, last):
    handles = []
    for name, parameter in trainable(parameters).items():

        def hook(parameter):
            sink.add(name, parameter.grad)  # noqa: B023
            parameter.grad = None
            if last():
                sink.ready(name)  # noqa: B023

        handles.append(parameter.register_post_accumulate_grad_hook(hook))
    return handles

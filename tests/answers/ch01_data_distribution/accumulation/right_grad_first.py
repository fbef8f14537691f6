"""Empties .grad before the sink hears of it."""

from minidist.parallel.data.reducer import trainable


def collect(parameters, sink, last):
    def hook_for(name):
        def hook(parameter):
            grad, parameter.grad = parameter.grad, None
            sink.add(name, grad)
            if last():
                sink.ready(name)

        return hook

    return [p.register_post_accumulate_grad_hook(hook_for(name)) for name, p in trainable(parameters).items()]

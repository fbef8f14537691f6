"""Keeps the sums itself and hands each over as soon as it is the last micro-batch or not."""

from minidist.parallel.data.reducer import trainable


def collect(parameters, sink, last):
    def hook_for(name):
        def hook(parameter):
            sink.add(name, parameter.grad.clone())
            parameter.grad = None
            return sink.ready(name) if last() else None

        return hook

    return [p.register_post_accumulate_grad_hook(hook_for(name)) for name, p in trainable(parameters).items()]

"""one_micro_batch: a gradient is said to be ready before it is handed over"""

from minidist.parallel.data.reducer import trainable


def collect(parameters, sink, last):
    def hook_for(name):
        def hook(parameter):
            if last():
                sink.ready(name)
            sink.add(name, parameter.grad)
            parameter.grad = None

        return hook

    return [p.register_post_accumulate_grad_hook(hook_for(name)) for name, p in trainable(parameters).items()]

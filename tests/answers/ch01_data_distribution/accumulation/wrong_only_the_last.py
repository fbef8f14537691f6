"""micro_batches_add_up: only the gradient of the last micro-batch is handed over"""

from minidist.parallel.data.reducer import trainable


def collect(parameters, sink, last):
    def hook_for(name):
        def hook(parameter):
            if last():
                sink.add(name, parameter.grad)
                sink.ready(name)
            parameter.grad = None

        return hook

    return [p.register_post_accumulate_grad_hook(hook_for(name)) for name, p in trainable(parameters).items()]

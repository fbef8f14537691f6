"""micro_batches_add_up: .grad is emptied in the last micro-batch only"""

from minidist.parallel.data.reducer import trainable


def collect(parameters, sink, last):
    def hook_for(name):
        def hook(parameter):
            sink.add(name, parameter.grad)
            if last():
                sink.ready(name)
                parameter.grad = None

        return hook

    return [p.register_post_accumulate_grad_hook(hook_for(name)) for name, p in trainable(parameters).items()]

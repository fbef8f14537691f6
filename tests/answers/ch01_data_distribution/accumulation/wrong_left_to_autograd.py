"""not_every_micro_batch_uses_a_parameter: autograd adds up, and what the last micro-batch does not use is lost"""

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

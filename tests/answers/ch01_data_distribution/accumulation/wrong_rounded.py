"""one_micro_batch: gradients are rounded to bfloat16 on their way to the sink"""

from minidist.parallel.data.reducer import trainable


def collect(parameters, sink, last):
    def hook_for(name):
        def hook(parameter):
            sink.add(name, parameter.grad.bfloat16().to(parameter.dtype))
            parameter.grad = None
            if last():
                sink.ready(name)

        return hook

    return [p.register_post_accumulate_grad_hook(hook_for(name)) for name, p in trainable(parameters).items()]

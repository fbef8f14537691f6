"""grad_is_left_empty: .grad is filled with zeros instead, and the memory is held twice"""

from minidist.parallel.data.reducer import trainable


def collect(parameters, sink, last):
    def hook_for(name):
        def hook(parameter):
            sink.add(name, parameter.grad.clone())
            parameter.grad.zero_()
            if last():
                sink.ready(name)

        return hook

    return [p.register_post_accumulate_grad_hook(hook_for(name)) for name, p in trainable(parameters).items()]

"""grad_is_left_empty: the hooks cannot be removed"""

from minidist.parallel.data.reducer import trainable


def collect(parameters, sink, last):
    def hook_for(name):
        def hook(parameter):
            sink.add(name, parameter.grad)
            parameter.grad = None
            if last():
                sink.ready(name)

        return hook

    for name, parameter in trainable(parameters).items():
        parameter.register_post_accumulate_grad_hook(hook_for(name))
    return []

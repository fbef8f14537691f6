"""nothing_is_sent_before_the_last: every micro-batch sends what it has"""

from minidist.parallel.data.reducer import trainable


def collect(parameters, sink, last):
    def hook_for(name):
        def hook(parameter):
            sink.add(name, parameter.grad)
            parameter.grad = None
            sink.ready(name)

        return hook

    return [p.register_post_accumulate_grad_hook(hook_for(name)) for name, p in trainable(parameters).items()]

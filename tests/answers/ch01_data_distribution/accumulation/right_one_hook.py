"""One hook for all parameters, which looks up the name."""

from minidist.parallel.data.reducer import trainable


def collect(parameters, sink, last):
    names = {id(parameter): name for name, parameter in trainable(parameters).items()}

    def hook(parameter):
        name = names[id(parameter)]
        sink.add(name, parameter.grad)
        parameter.grad = None
        if last():
            sink.ready(name)

    return [p.register_post_accumulate_grad_hook(hook) for p in parameters.values() if p.requires_grad]

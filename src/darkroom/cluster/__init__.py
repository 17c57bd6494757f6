"""Past one machine: the same prepare and train on a Ray cluster. The only package that imports Ray.

`connect` joins a cluster, or starts one of this machine alone; `prepare` fills a store's columns, `feed`
encodes pictures on other machines while training runs, `train` runs the training job in workers of the
cluster, and `doctor` looks whether a cluster is fit for it. None of them repeats what other packages do: they
place it, start it again where it was lost, and say how it goes.
"""

"""Train a small DeepSeek-V3-style model from a text file, with funcinfer's own pure functions.

    python -m examples.train_tiny --text kjv.txt --work .cache/tiny --out FOLDER

Nothing in the library knows of training. Its functions are plain differentiable torch, and autograd
follows them; `dense` gives them three ops in a form that suits whole sequences on a GPU.
"""

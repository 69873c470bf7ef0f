"""What predict.py is made of. In a program of yours: `from fastgpu.predict.model import load_model`, then
`model = load_model("runs/first").model`."""

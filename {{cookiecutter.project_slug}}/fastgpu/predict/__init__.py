"""Uses a trained model: predictions, metrics of a labelled file, export. Used by predict.py only: delete both if you do
not need them. In a program of your own: `model = fastgpu.predict.model.load_model("runs/first").model`.
"""

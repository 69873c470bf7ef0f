"""Uses a trained model: predictions, metrics of a labelled file, export. Used by predict.py only: delete both if you do
not need them. In a program of your own, with the folder of this project on sys.path:

    from fastgpu.predict.model import load_model

    trained = load_model("runs/first")  # or one of its checkpoints
    logits = trained.model(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))  # rows as they lie in the training file
"""

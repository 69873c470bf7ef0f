"""Uses a trained model: predictions, metrics of a labelled file, export. Used by predict.py only.

Nothing else imports this room: delete `fastgpu/predict` and `predict.py` if you do not need it. In a program of your
own, with the folder of this project on sys.path:

    from fastgpu.predict.model import load_model

    model, workload, card = load_model("runs/first/checkpoints/best-000001")
    print(card["attributes"]["class_names"], card["metrics"])
    logits = model(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))  # rows as they lie in the training file
"""

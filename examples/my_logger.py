"""A logger of one's own: a line in best.txt whenever the global model is better than in all rounds before."""


class MyLogger:
    def __init__(self, folder, after_round):  # rank 0 alone, at the start; `after_round` > 0: the run is resumed
        self.path = folder / "best.txt"
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        kept = [line for line in lines if int(line.split()[1]) <= after_round]  # the rounds beyond come again
        self.path.write_text("".join(f"{line}\n" for line in kept))
        self.best = float(kept[-1].split()[-1]) if kept else 0.0

    def log_round(self, round, values):  # after each round, once it is saved
        accuracy = values["global_test_accuracy"]  # NaN in a round without a test
        if accuracy > self.best:
            self.best = accuracy
            with open(self.path, "a") as file:
                file.write(f"round {round} global {accuracy:.4f}\n")

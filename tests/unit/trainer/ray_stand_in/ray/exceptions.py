"""Of ray's exceptions, those that the stand-in raises."""


class RayError(Exception):
    pass


class WorkerCrashedError(RayError):
    pass


class ActorDiedError(RayError):
    pass


class ObjectLostError(RayError):
    pass


class RayTaskError(RayError):
    def __init__(self, cause):
        super().__init__(f"ray::task() {cause}")
        self.cause = cause


class UserCodeException(RayError):
    """What a function of a dataset's raised is in the text of the RayTaskError around this."""

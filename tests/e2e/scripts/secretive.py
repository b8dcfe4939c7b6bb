"""Holds secrets everywhere a job has them, says them in every form, and dies by one; in its second
life not before the file `enough` is there."""

import os
import sys
import time

SECRET = os.environ["PLANTED"]
FORMS = (
    f"could not reach postgres://user:{SECRET}@db.example.com:5432/train",
    f"Authorization: Bearer {SECRET}", f"AWS_SECRET_ACCESS_KEY={SECRET}", f"hf_{SECRET}",
    f"login(user='me', password='{SECRET}')", f"Cookie: session={SECRET}",
    f"-----BEGIN PRIVATE KEY-----\n{SECRET}\n-----END PRIVATE KEY-----",
)
local = {"password": SECRET}
for form in FORMS:
    print(form)
    print(form, file=sys.stderr)
time.sleep(1.0)
while os.environ["TORCHELASTIC_RESTART_COUNT"] != "0" and not os.path.exists("enough"):
    time.sleep(0.02)
raise RuntimeError("; ".join(FORMS))

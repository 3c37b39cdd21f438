"""`python -m guest`: get the packages and print where they are."""

from guest.packages import guest_packages

print(guest_packages().root)

"""`check`: does a drafter decode as its training promises?"""

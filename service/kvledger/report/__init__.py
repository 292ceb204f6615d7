"""A page about a recorded interval, out of the files of --books, for a colleague.

steps      sums of steps as lines of load state them
timeline   what came when, in some hundred buckets of time
recorded   what the lines come to, collected while they are read
diagnoses  what limited each replica, in words
drawing    figures as SVG that follows the page's colours
charts     what each chart shows
page       the whole, as one HTML file without scripts
"""

/*
 * Dates of the Gregorian calendar as numbers of days, and back.
 *
 * Day zero is 1 January 1970. Months are counted from March inside of the
 * conversions, so that the leap day is the last day of the year.
 */

#include <ctype.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct date {
    int year;
    int month; /* 1 to 12 */
    int day;   /* 1 to 31 */
};

enum weekday { SUNDAY, MONDAY, TUESDAY, WEDNESDAY, THURSDAY, FRIDAY, SATURDAY };

static const char *const weekday_names[] = {
    "Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday",
};

static bool is_leap(int year)
{
    return (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
}

static int days_in_month(int year, int month)
{
    static const int days[] = { 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31 };

    if (month < 1 || month > 12)
        return 0;
    return month == 2 && is_leap(year) ? 29 : days[month - 1];
}

static bool date_is_valid(struct date d)
{
    return d.day >= 1 && d.day <= days_in_month(d.year, d.month);
}

static int64_t date_to_days(struct date d)
{
    int64_t y = d.month <= 2 ? (int64_t)d.year - 1 : d.year;
    int64_t era = (y >= 0 ? y : y - 399) / 400;
    int64_t year_of_era = y - era * 400;
    int64_t month = (d.month + 9) % 12;
    int64_t day_of_year = (153 * month + 2) / 5 + d.day - 1;
    int64_t day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;

    return era * 146097 + day_of_era - 719468;
}

static struct date date_from_days(int64_t days)
{
    struct date d;
    int64_t z = days + 719468;
    int64_t era = (z >= 0 ? z : z - 146096) / 146097;
    int64_t day_of_era = z - era * 146097;
    int64_t year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36524 - day_of_era / 146096) / 365;
    int64_t day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    int64_t month = (5 * day_of_year + 2) / 153;

    d.day = (int)(day_of_year - (153 * month + 2) / 5 + 1);
    d.month = (int)(month < 10 ? month + 3 : month - 9);
    d.year = (int)(year_of_era + era * 400 + (d.month <= 2));
    return d;
}

static enum weekday date_weekday(struct date d)
{
    int64_t days = date_to_days(d) + THURSDAY;

    return (enum weekday)(((days % 7) + 7) % 7);
}

/* Adds months; a day that the new month lacks becomes its last one. */
static struct date date_add_months(struct date d, int months)
{
    int total = d.year * 12 + d.month - 1 + months;
    int last;

    d.year = total >= 0 ? total / 12 : (total - 11) / 12;
    d.month = total - d.year * 12 + 1;
    last = days_in_month(d.year, d.month);
    if (d.day > last)
        d.day = last;
    return d;
}

/* Reads YYYY-MM-DD; returns false and leaves `out` alone where that is not a date. */
static bool date_parse(const char *text, struct date *out)
{
    struct date d;
    char rest;

    if (strlen(text) != 10 || !isdigit((unsigned char)text[0]))
        return false;
    if (sscanf(text, "%4d-%2d-%2d%c", &d.year, &d.month, &d.day, &rest) != 3)
        return false;
    if (!date_is_valid(d))
        return false;
    *out = d;
    return true;
}

int main(int argc, char **argv)
{
    struct date from, to, next;

    if (argc != 3 || !date_parse(argv[1], &from) || !date_parse(argv[2], &to)) {
        fprintf(stderr, "usage: %s YYYY-MM-DD YYYY-MM-DD\n", argv[0]);
        return EXIT_FAILURE;
    }
    printf("%lld days\n", (long long)(date_to_days(to) - date_to_days(from)));
    printf("from a %s to a %s\n", weekday_names[date_weekday(from)],
           weekday_names[date_weekday(to)]);
    next = date_from_days(date_to_days(date_add_months(to, 1)));
    printf("a month later: %04d-%02d-%02d\n", next.year, next.month, next.day);
    return EXIT_SUCCESS;
}

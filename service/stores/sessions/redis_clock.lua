-- Put before every library. Times are microseconds of this server's clock: whole numbers, which a double keeps exactly.
local function clock_us()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

local function whole(number)
  return string.format('%.0f', number + 0) -- never "-0", which Redis takes for no number
end

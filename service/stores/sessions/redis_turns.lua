-- Put after redis_common.lua before the scripts that know turn records. KEYS[6]: turns (hash: "t:<number>": a record as
-- JSON, the oldest has the lowest number; "q:<id>": request; "r:<id>": result), KEYS[7]: tail (list: the running turn's
-- chunks). A record: number, id, identity ('' for none), digest, base, status, cancel ('0' or '1'), expires
-- (microseconds as text: JSON numbers lose digits), bytes (of the result; while it runs, of the request and the chunks).
-- Each is a field of its own: a turn changes one record a few times, and its server writes down what is set.
local turns_key, tail_key = KEYS[6], KEYS[7]
local ABANDONED_US = 3600 * 1000000
local RUNNING_US = 2 * 86400 * 1000000 -- longer than any turn may take

local changed = {} -- records that are to be written

-- Key layout 1 and 2 had all records in the field "index".
local function read_index(raw)
  local turns = cjson.decode(raw)
  for number, turn in ipairs(turns) do
    turn.number = number
    changed[turn] = true
  end
  return turns
end

local function read_fields()
  local numbers, names, turns = {}, {}, {}
  for _, field in ipairs(redis.call('HKEYS', turns_key)) do
    local number = string.match(field, '^t:(%d+)$')
    if number then numbers[#numbers + 1] = tonumber(number) end
  end
  table.sort(numbers)
  for position, number in ipairs(numbers) do names[position] = 't:' .. whole(number) end
  if #names == 0 then return turns end
  for position, raw in ipairs(redis.call('HMGET', turns_key, unpack(names))) do
    turns[position] = cjson.decode(raw)
    turns[position].number = numbers[position]
  end
  return turns
end

local function read_turns(now)
  local index, turns = redis.call('HGET', turns_key, 'index'), {}
  for _, turn in ipairs(index and read_index(index) or read_fields()) do
    if tonumber(turn.expires) > now then turns[#turns + 1] = turn end
  end
  return turns
end

local function drop_turn(turns, position)
  redis.call('HDEL', turns_key, 'q:' .. turns[position].id, 'r:' .. turns[position].id)
  table.remove(turns, position)
end

-- Those that changed, and their sum in the head.
local function write_changes(head, turns)
  local bytes, until_us = 0, 0
  for _, turn in ipairs(turns) do
    bytes = bytes + turn.bytes
    until_us = math.max(until_us, tonumber(turn.expires))
    if changed[turn] then redis.call('HSET', turns_key, 't:' .. whole(turn.number), cjson.encode(turn)) end
  end
  redis.call('HDEL', turns_key, 'index')
  write_head(head, {turn_bytes = whole(bytes), turns_us = whole(until_us)})
end

-- Also what read_turns left out is gone after this.
local function write_turns(head, turns)
  local fields = {}
  for _, turn in ipairs(turns) do
    for _, field in ipairs({'t:' .. whole(turn.number), 'q:' .. turn.id, 'r:' .. turn.id}) do fields[field] = true end
  end
  if #turns == 0 then
    redis.call('UNLINK', turns_key, tail_key)
  else
    for _, field in ipairs(redis.call('HKEYS', turns_key)) do
      if not fields[field] then redis.call('HDEL', turns_key, field) end
    end
  end
  write_changes(head, turns)
end

local function find_running(turns)
  for position, turn in ipairs(turns) do
    if turn.status == 'running' then return turn, position end
  end
end

-- `digest`: also one that ended in another way counts, if its digest is another.
local function find_repeatable(turns, identity, digest)
  for position = #turns, 1, -1 do
    local turn = turns[position]
    local is_repeatable = turn.status == 'running' or turn.status == 'committed' or digest and turn.digest ~= digest
    if identity ~= '' and turn.identity == identity and is_repeatable then
      return turn
    end
  end
end

-- `result` is nil for a turn that nobody came back for.
local function close_turn(turn, status, result, expires_us)
  redis.call('HDEL', turns_key, 'q:' .. turn.id)
  redis.call('UNLINK', tail_key)
  if result then redis.call('HSET', turns_key, 'r:' .. turn.id, result) end
  turn.status, turn.expires, turn.bytes = status, whole(expires_us), result and #result or 0
  changed[turn] = true
end

-- The session moves on: by turn `id`, or by something else.
local function end_running(head, id, result, ttl_us)
  local now = clock_us()
  local turns = read_turns(now)
  local turn = find_running(turns)
  if not turn then return end
  if turn.id == id then
    close_turn(turn, 'committed', result, now + tonumber(ttl_us))
  else
    close_turn(turn, 'failed', nil, now + ABANDONED_US)
  end
  write_turns(head, turns)
end

-- The session was taken back to `from_version`: what turns made of it since then is deleted.
local function drop_results(head, from_version)
  local turns = read_turns(clock_us())
  for _, turn in ipairs(turns) do
    if tonumber(turn.base) >= from_version and turn.bytes > 0 then
      redis.call('HDEL', turns_key, 'r:' .. turn.id)
      turn.status, turn.bytes = 'cancelled', 0
      changed[turn] = true
    end
  end
  if #turns > 0 then write_turns(head, turns) end
end

local function lease_left_us(head, now)
  if head.holder == '' then return 0 end
  return math.max(0, tonumber(head.lease_us) - now)
end

-- JSON, request, result, the rest of the lease, chunks.
local function show_turn(head, turn, now, first_chunk, is_brief)
  local shown = {
    'turn', cjson.encode(turn), not is_brief and redis.call('HGET', turns_key, 'q:' .. turn.id) or '',
    redis.call('HGET', turns_key, 'r:' .. turn.id) or '', whole(lease_left_us(head, now)),
  }
  if turn.status == 'running' then
    for _, chunk in ipairs(redis.call('LRANGE', tail_key, first_chunk, -1)) do shown[#shown + 1] = chunk end
  end
  return shown
end
